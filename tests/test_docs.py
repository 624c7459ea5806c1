"""What README and docs name exists: files, make targets, commands, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
PACKAGES = ("runtime", "wrappers", "validate", "convert")
_TREE_LINE = re.compile(r"(?P<indent> *)(?P<name>\S+) {2,}\S.*")


def tree_paths(text: str) -> list[str]:
    """The paths in README's tree: two spaces deeper is inside the folder above."""
    block = text.split("## Files", 1)[1].split("```", 2)[1]
    paths, folders = [], []
    for line in block.strip("\n").splitlines():
        match = _TREE_LINE.fullmatch(line)
        assert match is not None, f"no description: {line!r}"
        depth = len(match["indent"]) // 2
        folders[depth:] = [match["name"]]
        paths.append("".join(folders))
    return paths


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_the_tree_is_on_disk() -> None:
    missing = [path for path in tree_paths(README) if not (ROOT / path).exists()]
    assert not missing


def test_every_module_is_in_the_tree() -> None:
    inside = [file for package in (*PACKAGES, "examples", "benchmarks") for file in (ROOT / package).rglob("*")]
    files = {
        file.relative_to(ROOT).as_posix()
        for file in (*inside, *ROOT.glob("*.py"))
        if file.suffix in (".py", ".txt") and (file.name != "__init__.py" or file.parent == ROOT)
    }
    assert files - set(tree_paths(README)) == set()


def test_a_path_that_is_not_there_is_found() -> None:
    assert tree_paths("## Files\n```\nruntime/  x\n  gone.py  y\n```") == ["runtime/", "runtime/gone.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text("utf-8"), re.MULTILINE))
    assert named <= make_targets()
    if page.name == "README.md":
        assert {"demo", "test"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    from edge_convert.cli import main

    known = set(main.commands)
    text = page.read_text("utf-8")
    assert set(re.findall(r"(?:^|`)edge-convert ([a-z]+)", text, re.MULTILINE)) <= known
    options = {option for command in main.commands.values() for item in command.params for option in item.opts}
    for line in re.findall(r"^edge-convert .*$", text, re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", line)) <= options


def test_targets_that_the_readme_names_exist() -> None:
    from edge_convert.runtime.device import aliases, load_profiles

    known = {*load_profiles(), *aliases()}
    assert {"cpu", "cuda", "jetson", "jetson-orin-nano-8gb-jp6"} <= known
    assert set(re.findall(r"--target (\S+)", README)) <= known


def test_version_is_in_the_changelog() -> None:
    import edge_convert

    assert f"## [{edge_convert.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_docs_compiles(page: Path) -> None:
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
        compile(code, f"{page.name}, example {number}", "exec")
