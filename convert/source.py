"""What the user has: a Hugging Face folder or hub id, a GGUF file, an ONNX file, or `module:factory`.

Opening a source checks that it is whole (no truncated weights) and hashes it; it loads no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_convert.convert.external_data import check_external_data
from edge_convert.convert.gguf import check_gguf
from edge_convert.runtime.errors import SourceError, UnsupportedModelError

KINDS = "a Hugging Face folder or hub id, a .gguf file, an .onnx file, or module:factory"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FACTORY = re.compile(r"(?P<module>[\w./\\-]+):(?P<factory>[A-Za-z_]\w*)")
# What an ONNX file's recipe reads beside it, and so belongs to the source.
ONNX_SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "modules.json", "1_Pooling/config.json",
    "sentence_bert_config.json", "preprocessor_config.json", "labels.txt",
)  # fmt: skip
# Decoder-only classes of transformers end in one of these; so do their GGUF architectures' classes.
_CAUSAL_LM = "ForCausalLM"


@dataclass(frozen=True, slots=True)
class Source:
    """A checked source. `path` is None only for `module`; `sha256` is over all weight and config files."""

    kind: str
    location: str
    path: Path | None
    config: dict[str, Any]
    sha256: str
    name: str


def open_source(text: str) -> Source:
    """Find out what `text` names and check it; raises SourceError with what was found."""
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_folder(path, text)
    if path.suffix == ".gguf":
        return _open_gguf(_existing(path), text)
    if path.suffix == ".onnx":
        data = check_external_data(_existing(path))
        beside = [file for name in ONNX_SIDE_FILES if (file := path.parent / name).is_file()]
        return Source("onnx", text, path.resolve(), {}, _sha256([path, *data, *beside]), path.stem)
    if match := _FACTORY.fullmatch(text):
        return _open_factory(text, match["module"], match["factory"])
    if path.exists():
        raise SourceError(f"{text} is a file of no known kind ({path.suffix or 'no suffix'}). Give {KINDS}.")
    if _HUB_ID.fullmatch(text) and not text.startswith((".", "/")) and not path.parent.is_dir():
        return _open_hub(text)
    raise SourceError(f"{text} does not exist. Give {KINDS}.")


def detect_task(source: Source) -> str:
    """The task of `source` from its config, in optimum's vocabulary.

    Raises UnsupportedModelError with what was found and what is supported.
    """
    from edge_convert.convert.recipe import RECIPES

    supported = ", ".join(sorted(RECIPES))
    if source.kind == "gguf":
        return "text-generation"
    if source.kind == "module":
        return "image-classification"
    if source.kind == "onnx":
        raise UnsupportedModelError(f"An ONNX file does not say its task. Pass --task with one of: {supported}.")
    architectures = source.config.get("architectures") or []
    if any(name.endswith((_CAUSAL_LM, "ForConditionalGeneration")) for name in architectures):
        return "text-generation"
    assert source.path is not None
    if (source.path / "modules.json").is_file():
        return "feature-extraction"
    task = _optimum_task(architectures[0]) if architectures else None
    if task in RECIPES:
        return str(task)
    found = ", ".join(architectures) or f"model_type {source.config.get('model_type')!r}"
    raise UnsupportedModelError(
        f"{source.name} has the architecture {found} (task {task or 'unknown'}); supported tasks: {supported}. "
        "Pass --task to choose one if the model fits it."
    )


def _optimum_task(architecture: str) -> str | None:
    """optimum's task name for the transformers class called `architecture`, or None."""
    import transformers
    from optimum.exporters.tasks import TasksManager

    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        return None
    try:
        task: str = TasksManager.infer_task_from_model(model_class)
    except ValueError:
        return None
    return task


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise SourceError(f"{path} does not exist or is not a file. Give {KINDS}.")
    if path.stat().st_size == 0:
        raise SourceError(f"{path} is empty. Copy or download it again.")
    return path


def _open_folder(folder: Path, text: str) -> Source:
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        raise SourceError(f"The folder {text} is empty. Give {KINDS}.")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise SourceError(f"{text} has no config.json; found: {', '.join(names[:8])}. Give {KINDS}.")
    config = read_object(config_file)
    _check_names(config, config_file)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise SourceError(
            f"{text} has a config and no *.safetensors weights; found: {', '.join(names[:8])}. "
            "Download the weights, or save them with save_pretrained()."
        )
    tensors = sum(check_safetensors(file) for file in weights)
    for part in (config, config.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > tensors:
            raise SourceError(
                f"{config_file} asks for {layers} layers, and the weights have {tensors} tensors. Use the config that "
                "belongs to the weights."
            )
    extras = [folder / name for name in names if name.endswith((".json", ".txt", ".model"))]
    return Source("huggingface", text, folder.resolve(), config, _sha256([*weights, *extras]), folder.resolve().name)


def read_json(path: Path) -> Any:
    """What the JSON file says, None if there is none; raises SourceError for a broken one."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError as error:
        raise SourceError(f"{path.name} is nested too deeply to be read. Copy or download it again.") from error
    except ValueError as error:
        raise SourceError(f"{path.name} is not JSON: {error}. Copy or download it again.") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file, {} if there is no file; raises SourceError for a broken one."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise SourceError(f"{path.name} is not a JSON object. Copy or download it again.")
    return found


def _check_names(config: dict[str, Any], file: Path) -> None:
    """Raise SourceError unless the config names its model the way transformers writes it."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise SourceError(f"{file} has the architectures {architectures!r:.80}; a list of names is needed. Correct it.")
    if model_type is not None and not isinstance(model_type, str):
        raise SourceError(f"{file} has the model_type {model_type!r:.80}; a name is needed. Correct it.")


def check_safetensors(path: Path) -> int:
    """The number of tensors; raises SourceError unless the header is sound and the file as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        header = file.read(length) if 0 < length <= min(size - 8, 100_000_000) else b""
    try:
        tensors = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path.name} is not a whole safetensors file ({size} bytes). Download it again.") from error
    if 8 + length + end != size:
        raise SourceError(
            f"{path.name} is truncated: {size} bytes found, {8 + length + end} expected. Download it again."
        )
    return len(tensors.keys() - {"__metadata__"})


def _open_gguf(path: Path, text: str) -> Source:
    architecture = check_gguf(path)
    return Source("gguf", text, path.resolve(), {"model_type": architecture}, _sha256([path]), path.stem)


def _open_factory(text: str, module: str, factory: str) -> Source:
    load_factory(text)
    file = Path(module)
    digest = _sha256([file]) if file.is_file() else hashlib.sha256(text.encode()).hexdigest()
    return Source("module", text, None, {}, digest, file.stem if file.is_file() else module)


def load_factory(location: str) -> Any:
    """The callable that `module:factory` (a dotted module or a .py file) names; raises SourceError."""
    module_name, _, factory = location.rpartition(":")
    file = Path(module_name)
    try:
        if file.suffix == ".py":
            spec = importlib.util.spec_from_file_location(file.stem, file)
            if spec is None or spec.loader is None or not file.is_file():
                raise SourceError(f"{module_name} does not exist. Give module:factory or file.py:factory.")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise SourceError(f"The module {module_name!r} cannot be imported: {error}.") from error
    if not callable(getattr(module, factory, None)):
        raise SourceError(f"{module_name} has no callable {factory!r}. Give module:factory of a torch.nn.Module.")
    return getattr(module, factory)


def _open_hub(hub_id: str) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0][:160]
        raise SourceError(
            f"The model {hub_id!r} could not be fetched from the hub ({type(error).__name__}: {reason}). Check the id "
            "and the network, or give a local folder."
        ) from error
    found = _open_folder(folder, hub_id)
    return Source(found.kind, hub_id, found.path, found.config, found.sha256, hub_id.rpartition("/")[2])


def _sha256(files: list[Path]) -> str:
    """One digest over the names and bytes of `files`."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
