"""Loading an original with transformers only if every weight of it comes from its files.

transformers fills what a checkpoint lacks with random numbers and drops what its config has no place for;
both would pass every later check, because the export and the reference load the same wrong model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_convert.convert.interrupt import raise_if_disk_full, raise_if_interrupted
from edge_convert.runtime.errors import SourceError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def load_whole(auto_class: Any, folder: Path, name: str, *, unused: Sequence[str] = (), **options: Any) -> Any:
    """`auto_class.from_pretrained(folder, **options)`, refused unless its weights are all there and all used.

    Args:
        auto_class: A transformers auto class.
        folder: What it loads.
        name: What the user calls it.
        unused: Prefixes of weights that the caller never reads, which may be missing.
        options: For from_pretrained.

    Raises:
        SourceError: It cannot be loaded, lacks weights, has them in other shapes, or has weights that its
            config drops.
    """
    # Before any memory is taken for weights of the size that a broken config asks for.
    check_whole(auto_class, folder, name, unused=unused)
    return _load(auto_class, folder, name, unused, options)


def check_whole(auto_class: Any, folder: Path, name: str, *, unused: Sequence[str] = ()) -> None:
    """Raise SourceError as load_whole does, from the names and shapes alone."""
    _load(auto_class, folder, name, unused, {"device_map": "meta", "local_files_only": True})


def _load(auto_class: Any, folder: Path, name: str, unused: Sequence[str], options: dict[str, Any]) -> Any:
    try:
        model, info = auto_class.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:
        raise_if_interrupted(error)
        raise_if_disk_full(error)
        raise SourceError(
            f"{name} cannot be loaded by transformers ({type(error).__name__}: {first_line(error)}). Check that its "
            "config belongs to its weights."
        ) from error
    check_loaded(model, info, name, unused=unused)
    return model


def check_loaded(model: Any, info: dict[str, Any], name: str, *, unused: Sequence[str] = ()) -> None:
    """Raise SourceError unless transformers' loading info says that `model` is the checkpoint and nothing else.

    Tied weights and those that the model class declares as optional are not in the info. Other weights that
    were not used (a head, an image tower) are logged.
    """
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith(tuple(unused))):
        raise SourceError(
            f"{name} lacks {_count(missing)} that its config asks for (first: {missing[0]}). Copy or download it "
            "again, with the config that belongs to it."
        )
    if mismatched := sorted(info["mismatched_keys"]):
        key, found, wanted = mismatched[0]
        raise SourceError(
            f"{name} has {_count(mismatched)} of another shape than its config says (first: {key}, {tuple(found)} "
            f"found, {tuple(wanted)} needed). Use the config that belongs to the weights."
        )
    unexpected = sorted(info["unexpected_keys"])
    known = set(model.state_dict())
    if dropped := [key for key in unexpected if _belongs(key, known)]:
        raise SourceError(
            f"{name} has {_count(dropped)} that its config leaves out (first: {dropped[0]}). Use the config that "
            "belongs to the weights."
        )
    if unexpected:
        log.warning("%s has %s that the model does not use (first: %s)", name, _count(unexpected), unexpected[0])


def compute_in_fp32(model: torch.nn.Module) -> torch.nn.Module:
    """Make `model` compute in float32 with matrices that stay in memory as they are stored; returns it.

    Linear layers and token embeddings in bfloat16 or float16 widen their weights each time they are used, which is exact
    and halves the memory; every other parameter and buffer is widened now.
    """
    import torch
    from torch.nn import functional

    def linear(module: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: functional.linear(
            x.float(), module.weight.float(), None if module.bias is None else module.bias.float()
        )

    def embedding(module: torch.nn.Embedding) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: functional.embedding(ids, module.weight, module.padding_idx).float()

    kept, widened = set(), set()
    for module in model.modules():
        # Subclasses may do more with their weights than the plain classes.
        if type(module) is torch.nn.Linear:
            module.__dict__["forward"] = linear(module)
            kept.add(id(module.weight))
        elif type(module) is torch.nn.Embedding and module.max_norm is None:
            module.__dict__["forward"] = embedding(module)
            kept.add(id(module.weight))
        else:
            widened |= {id(tensor) for tensor in module._parameters.values()}  # a weight may be tied to a plain one
    kept -= widened
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.is_floating_point() and id(tensor) not in kept:
                    tensor.data = tensor.data.float()
    return model


def first_line(error: BaseException) -> str:
    """The start of an error's text."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def _belongs(key: str, known: set[str]) -> bool:
    """Whether the model would have the weight `key`, had its config more layers or the right architecture.

    That is so if the same weight of layer 0 is in the model, or the bias's weight (or the weight's bias).
    """
    siblings = [f"{key[: match.start()]}0{key[match.end() :]}" for match in _NUMBER.finditer(key)]
    module, _, leaf = key.rpartition(".")
    if leaf in ("weight", "bias"):
        siblings.append(f"{module}.{'bias' if leaf == 'weight' else 'weight'}")
    return any(sibling != key and sibling in known for sibling in siblings)


def _count(keys: Sequence[Any]) -> str:
    return f"{len(keys)} tensor{'' if len(keys) == 1 else 's'}"
