"""What README and docs name exists: files, make targets, commands, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from assets import PINS

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


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            assert (page.parent / file).exists(), link
            assert not anchor or anchor in anchors(page.parent / file if file else page), link


def bounds(heading: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """(task, metric, min or max) and the bound at each precision, from the table under a heading of validation.md."""
    section = (ROOT / "docs" / "validation.md").read_text("utf-8").split(f"## {heading}", 1)[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z-]+) `(\w+)` ([≤≥]) \|(.*)\|$", section, re.MULTILINE)
    return {
        (task, metric, {"≤": "max", "≥": "min"}[sign]): {
            precision: float(cell)
            for precision, cell in zip(("auto", "fp32", "fp16", "int8", "int4"), cells.split("|"), strict=True)
            if cell.strip()
        }
        for task, metric, sign, cells in rows
    }


def test_accuracy_bounds_are_those_of_devices_yaml() -> None:
    from edge_convert.runtime.device import load_profiles

    table: dict[str, dict[str, dict[str, float]]] = {}
    for (task, metric, end), row in bounds("Accuracy").items():
        for precision, bound in row.items():
            table.setdefault(task, {}).setdefault(precision, {})[f"{metric}_{end}"] = bound
    assert all(profile.gates == table for profile in load_profiles().values())


def test_bounds_of_the_invariants_are_those_of_the_suites() -> None:
    from edge_convert.validate import suites_embed, suites_image, suites_text

    assert bounds("Invariants") == {
        ("text-generation", "kl_max", "max"): suites_text.SAME_RESULT_KL,
        ("feature-extraction", "cosine_min", "min"): suites_embed.SAME_RESULT_COSINE,
        ("image-classification", "probability_change_max", "max"): suites_image.SAME_RESULT_PROBABILITY,
    }


def test_latency_metrics_are_those_of_the_suites() -> None:
    from edge_convert.validate.suites import LATENCY_METRICS

    section = (ROOT / "docs" / "validation.md").read_text("utf-8").split("## Latency", 1)[1]
    assert set(re.findall(r"`(\w+)`", section)) - {"gates", "_min", "_max"} == set(LATENCY_METRICS)


def test_pins_of_the_assets_are_those_that_make_installs() -> None:
    installed = "".join((ROOT / name).read_text("utf-8") for name in ("Makefile", "constraints.txt")).split()
    assert [pin for pin in map("==".join, PINS.items()) if pin not in installed] == []


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "examples").glob("*.py")], ids=lambda page: page.name)
def test_pins_that_a_page_names_are_those_of_the_assets(page: Path) -> None:
    for name, version in re.findall(r"([a-z][\w-]+)==([\d.]+\d)", page.read_text("utf-8")):
        assert PINS.get(name) == version


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
