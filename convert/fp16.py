"""float16 graphs of encoders and classifiers, with fp32 islands where measurement asks for them.

ONNX Runtime computes a float16 graph on the CPU in fp32 for the most part, so a run there says nothing about a GPU.
Here the fp32 graph is run once with every value looked at, and once more with every value rounded as a GPU stores it.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.calibration import token_feeds
from edge_convert.convert.graph_tools import Feed, cpu_session, inner_graphs, replace_items, spread, with_outputs
from edge_convert.convert.interrupt import raise_if_interrupted
from edge_convert.runtime.errors import ExportError

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

LARGEST = 65504.0  # of float16
SMALLEST_NORMAL = 2.0**-14  # below it float16 loses bits, and from 2^-25 on everything
SAFE = LARGEST / 8  # for what inputs change: MiniLM on real texts goes 4.2 times as far as on random tokens
MOSTLY = 0.5  # share of the non-zero values
ERROR_BOUND = 0.02  # of an output row's length: cosine 1 - 0.02^2 / 2 = 0.9998, and the gates ask for 0.9995
MAX_FEEDS = 8
_EMULATED_FEEDS = 4
_ALONE_FEEDS = 2
_ROUNDS = 6
_SHARE_PER_ROUND = 1 / 16  # of the float16 nodes go back to fp32 when the error is too large
_VALUES_PER_RUN = 64
_LONG_TEXTS = (512, 256, 128, 64)  # tokens; the longest that the graph runs
_ROUNDED, _EXACT, _OWN = "__as_float16", "__before_rounding", "__fp32"

_SQUARES = (
    "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "InstanceNormalization", "GroupNormalization", "LpNormalization", "ReduceL2",
    "ReduceSumSquare",
)  # fmt: skip
_SUMS = ("ReduceSum", "ReduceMean", "ReduceL1", "GlobalAveragePool")
_EXPONENTIALS = ("Softmax", "LogSoftmax")  # of differences from the largest: each at most 1
_SPATIAL = ("GlobalAveragePool", "InstanceNormalization")
_LAST_AXES = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
_NO_ZERO = {"Div": 1, "Reciprocal": 0, "Log": 0}  # the input that must not become 0
_FLOORS = ("Add", "Max", "Clip")
_CARRIERS = ("Sqrt", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Identity")
_FIXED_FLOAT = {"Resize": (2,), "GroupNorm": (1, 2), "SkipGroupNorm": (1, 2)}  # inputs that operators read in fp32


@dataclass(frozen=True, slots=True)
class Measured:
    """One float value over all feeds: magnitudes of its finite, non-zero elements."""

    peak: float  # the largest
    least: float  # the smallest, where it is below SMALLEST_NORMAL; else infinity
    tiny: int  # how many are below SMALLEST_NORMAL
    count: int
    shape: tuple[int, ...]  # of the largest array seen
    nan: bool = False
    infinite: bool = False

    @property
    def underflows(self) -> bool:
        """Whether more than MOSTLY of the elements lie below float16's normal numbers."""
        return self.tiny > MOSTLY * self.count

    def __or__(self, other: Measured) -> Measured:
        return Measured(
            max(self.peak, other.peak),
            min(self.least, other.least),
            self.tiny + other.tiny,
            self.count + other.count,
            max(self.shape, other.shape, key=math.prod),
            self.nan or other.nan,
            self.infinite or other.infinite,
        )


@dataclass(frozen=True, slots=True)
class Emulation:
    """A run with every value rounded as float16 stores it."""

    outputs: list[list[NDArray[Any]]]  # for each feed, in the graph's order
    values: dict[str, Measured]  # by the names of the fp32 graph, as they are after rounding


@dataclass(frozen=True, slots=True)
class Fp16Report:
    """What was written: the reason for each fp32 node, how many nodes are in float16, the emulated error."""

    islands: dict[str, str]
    float16_nodes: int
    error: float  # the largest of an output row's: |float16 - fp32| / |fp32|
    values: dict[str, Measured] = field(repr=False, default_factory=dict)


def to_float16(source: Path, destination: Path, *, feeds: Iterable[Feed] | None = None) -> Fp16Report:
    """Write a float16 graph with fp32 inputs and outputs; nodes that measurably need it stay in fp32.

    Args:
        source: fp32 graph.
        destination: where the float16 graph is written, weights inside.
        feeds: calibration feeds, of which `MAX_FEEDS` are run, evenly spread; None for texts of random tokens.
    """
    import onnx

    model = prepared(onnx.load(source))
    chosen = text_feeds(model) if feeds is None else spread(list(feeds), MAX_FEEDS)
    if not chosen:
        raise ExportError("fp16 needs calibration inputs to measure the values inside the graph, and there are none.")
    values = measure(model, chosen)
    fault = first_fault(model, values)
    if fault is not None:
        raise ExportError(f"The fp32 graph itself gives {_described(*fault, values)} on a calibration input.")
    islands = choose_islands(model, values)
    error = _settle(model, chosen, values, islands)
    written = convert(model, values, islands)
    verify(written, islands, values, model)
    onnx.save(written, destination)
    inside = [node.name for node in model.graph.node if _is_float(node, values) and node.name not in islands]
    log.info("fp16: %d nodes in float16, %d in fp32, emulated error %.2g", len(inside), len(islands), error)
    for name, reason in islands.items():
        log.debug("fp32: %s, for %s", name, reason)
    return Fp16Report(islands, len(inside), error, values)


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every node has its own name and every float constant is an initialiser and no input."""
    from onnx import numpy_helper

    made = copy.deepcopy(model)
    taken: set[str] = set()
    nodes = []
    for index, node in enumerate(made.graph.node):
        tensor = next((item.t for item in node.attribute if item.name == "value"), None)
        if node.op_type == "Constant" and tensor is not None and tensor.data_type == 1:
            made.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(tensor), node.output[0]))
            continue
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_fp16_{index}"
        taken.add(node.name)
        nodes.append(node)
    replace_items(made.graph.node, nodes)
    weights = {tensor.name for tensor in made.graph.initializer}
    replace_items(made.graph.input, [value for value in made.graph.input if value.name not in weights])
    return made


def text_feeds(model: onnx.ModelProto) -> list[Feed]:
    """Feeds of an encoder: random texts, half of each feed padded, and one text as long as the graph takes.

    Padding shows what masks do, the long text how far sums over the sequence go. A graph whose vocabulary is too
    small for `token_feeds` gets a few tokens of the number 1.
    """
    feeds = spread(token_feeds(model), MAX_FEEDS - 1)
    if not feeds:
        return _few_tokens(model)
    long = _long_feed(model, feeds[0])
    for feed in feeds:
        for name, value in feed.items():
            if "mask" in name and value.ndim == 2:
                value[1::2, value.shape[1] // 2 :] = 0
    return [*feeds, *long]


def measure(model: onnx.ModelProto, feeds: Sequence[Feed], only: Collection[str] | None = None) -> dict[str, Measured]:
    """Every float32 value of the graph on the feeds: inputs, weights and what nodes give; of these `only` some.

    `_VALUES_PER_RUN` values are fetched at a time, so memory does not grow with the graph.
    """
    found = _weights(model)
    for feed in feeds:
        _merge(found, ((name, value) for name, value in feed.items() if value.dtype == np.float32))
    names = [name for name, kind in value_types(model).items() if kind == "tensor(float)"]
    names = [name for name in names if only is None or name in only]
    for start in range(0, len(names), _VALUES_PER_RUN):
        group = names[start : start + _VALUES_PER_RUN]
        session = _session(model, group)
        for feed in feeds:
            _merge(found, zip(group, session.run(group, feed), strict=True))
    return found


def summarise(value: NDArray[np.float32]) -> Measured:
    """The magnitudes of one array."""
    sizes = np.abs(value)
    nan = infinite = False
    if not np.isfinite(sizes.max(initial=0)):
        nan, infinite = bool(np.isnan(sizes).any()), bool(np.isinf(sizes).any())
        sizes = sizes[np.isfinite(sizes)]
    count = int(np.count_nonzero(sizes))
    tiny = int(np.count_nonzero(sizes < SMALLEST_NORMAL)) - (sizes.size - count)
    least = float(sizes[sizes > 0].min()) if tiny else math.inf
    return Measured(float(sizes.max(initial=0)), least, tiny, count, value.shape, nan, infinite)


def value_types(model: onnx.ModelProto) -> dict[str, str]:
    """The type of each value that a node gives, as ONNX Runtime names it: tensor(float), tensor(float16), ..."""
    names = [name for node in model.graph.node for name in node.output if name]
    found = {value.name: value.type for value in _session(model, names).get_outputs()}
    return {name: found[name] for name in names}


def first_fault(model: onnx.ModelProto, values: Mapping[str, Measured]) -> tuple[str, str] | None:
    """The first node, and the value, with NaN or with an infinity out of finite inputs; None if there is none.

    An infinity that comes from an infinite constant is a mask: float16 has it too.
    """
    for node in model.graph.node:
        read = [name for name in _reads(node) if name in values]
        for name in read:
            if values[name].nan:
                return node.name, name
        inherited = any(values[name].infinite for name in read)
        for name in node.output:
            if name in values and (values[name].nan or (values[name].infinite and not inherited)):
                return node.name, name
    return None


def choose_islands(model: onnx.ModelProto, values: Mapping[str, Measured]) -> dict[str, str]:
    """The nodes that stay in fp32 and why, by what was measured."""
    from onnx import numpy_helper

    integers = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.data_type == 7
    }
    weights = {tensor.name for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        reason = _reason(node, values, weights, integers) if _is_float(node, values) else None
        if reason is not None:
            found[node.name] = reason
    return found | {name: reason for name, reason in _floors(model, values, weights) if name not in found}


def inner_bound(node: onnx.NodeProto, values: Mapping[str, Measured], integers: Mapping[str, NDArray[Any]]) -> float:
    """A bound on the sums inside a node, which no output shows; 0 where there is none to fear.

    With n summed elements of at most p: n p^2 for sums of squares (the variance of a layer norm too, for
    sum (x - mean)^2 <= sum x^2), n p for sums, n for a softmax, and sqrt(d) p_q p_k for attention's products of
    d channels over sqrt(d). Matrix products and convolutions add up in fp32 on GPUs, so their outputs are enough.
    """
    value = values.get(node.input[0]) if node.input else None
    if value is None:
        return 0.0
    if node.op_type == "MultiHeadAttention":
        return _attention_bound(node, values)
    if node.op_type not in (*_SQUARES, *_SUMS, *_EXPONENTIALS):
        return 0.0
    length = _summed(node, value.shape, integers)
    if node.op_type in _SQUARES:
        parts = node.input[:2] if node.op_type.startswith("Skip") else node.input[:1]
        return float(length * sum(values[name].peak for name in parts if name in values) ** 2)
    if node.op_type in _SUMS:
        return length * value.peak
    return float(length)


def emulated(model: onnx.ModelProto, feeds: Sequence[Feed], *, islands: Collection[str] = ()) -> Emulation:
    """Run the fp32 graph with weights and values rounded to float16, but for the nodes `islands`.

    Rounding happens where a GPU writes a value to memory. Inside an operator everything stays in fp32, see
    `inner_bound` for that.
    """
    floats = _floats(model)
    rounded = emulation(model, floats, islands)
    values = _weights(model) | measure(rounded, feeds, floats)
    names = [value.name for value in model.graph.output]
    session = _session(rounded, names)
    return Emulation([session.run(names, feed) for feed in feeds], {name: values[name] for name in floats})


def emulation(model: onnx.ModelProto, floats: Collection[str], islands: Collection[str]) -> onnx.ModelProto:
    """A copy of the fp32 graph with a cast to float16 and back where a float16 node reads or writes.

    Args:
        model: fp32 graph as `prepared` gives it.
        floats: names of its float32 values, weights and inputs.
        islands: names of the nodes that stay as they are.
    """
    from onnx import numpy_helper

    made = copy.deepcopy(model)
    weights = {tensor.name: tensor for tensor in made.graph.initializer}
    stored: set[str] = set()  # values that float16 nodes write
    copies: set[str] = set()
    floats = set(floats)
    nodes: list[onnx.NodeProto] = []
    for node in made.graph.node:
        if node.name in islands or not floats & {*node.input, *node.output}:
            nodes.append(node)
            continue
        for at, name in enumerate(node.input):
            if name not in floats or name in stored or at in _FIXED_FLOAT.get(node.op_type, ()):
                continue
            node.input[at] = name + _ROUNDED
            if name not in copies and name in weights:
                value = as_float16(numpy_helper.to_array(weights[name])).astype(np.float32)
                made.graph.initializer.append(numpy_helper.from_array(value, name + _ROUNDED))
            elif name not in copies:
                nodes += _rounding(name, name + _ROUNDED)
            copies.add(name)
        nodes.append(node)
        for at, name in enumerate(node.output):
            if name in floats:
                node.output[at] = name + _EXACT
                nodes += _rounding(name + _EXACT, name)
                stored.add(name)
    replace_items(made.graph.node, nodes)
    read = {name for node in nodes for name in _reads(node)} | {value.name for value in made.graph.output}
    replace_items(made.graph.initializer, [tensor for tensor in made.graph.initializer if tensor.name in read])
    return made


def as_float16(value: NDArray[Any]) -> NDArray[np.float16]:
    """Rounded to nearest; beyond LARGEST infinite, as on every device."""
    with np.errstate(over="ignore"):
        return value.astype(np.float16)


def row_error(expected: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> float:
    """The largest |found - expected| / |expected| over rows (first axis); short rows count as a tenth of the mean."""
    worst = 0.0
    for wanted, given in zip(expected, found, strict=True):
        if not np.issubdtype(wanted.dtype, np.floating) or wanted.size == 0:
            continue
        finite = np.isfinite(wanted)
        rows, others = (
            np.where(finite, item, 0).reshape(len(item) if item.ndim > 1 else 1, -1) for item in (wanted, given)
        )
        lengths = np.linalg.norm(rows, axis=1)
        floor = max(float(lengths.mean()) / 10, 1e-30)
        error = float((np.linalg.norm(others - rows, axis=1) / np.maximum(lengths, floor)).max())
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def convert(model: onnx.ModelProto, values: Mapping[str, Measured], islands: Collection[str]) -> onnx.ModelProto:
    """The float16 graph, by ONNX Runtime's converter and with what it gets wrong put right.

    It takes a value without a type for something that needs no cast (so every type is written down first), rounds
    the weights of an island if another node reads them too, moves weights below 6e-8 up to it, passes values
    from island to island, and to the outputs, through float16, does not look into control flow, and leaves nodes
    unsorted.
    """
    from onnx import TensorProto, helper
    from onnxruntime.transformers.float16 import convert_float_to_float16

    typed = copy.deepcopy(model)
    _own_weights(typed, values, islands)
    originals = {tensor.name: tensor for tensor in copy.deepcopy(typed.graph.initializer)}
    outside = {value.name for value in (*typed.graph.input, *typed.graph.output)} | set(originals)
    kept = [value for value in typed.graph.value_info if value.name not in values]
    known = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for node in typed.graph.node
        for name in node.output
        if name in values and name not in outside
    ]
    replace_items(typed.graph.value_info, [*kept, *known])
    try:
        half = convert_float_to_float16(
            typed,
            keep_io_types=True,
            disable_shape_infer=True,
            op_block_list=[],
            node_block_list=list(islands),
        )
    except (RuntimeError, ValueError, AttributeError, KeyError, TypeError, AssertionError) as error:
        raise_if_interrupted(error)
        raise ExportError(f"Writing fp16 failed: {str(error)[:200] or type(error).__name__}") from error
    _round_weights(half, originals)
    own = {node.name for node in model.graph.node}
    _join_islands(half, own)
    _cast_captured(half, islands, own)
    _sort(half)
    assert isinstance(half, type(model))
    return half


def verify(
    written: onnx.ModelProto, islands: Collection[str], values: Mapping[str, Measured], model: onnx.ModelProto
) -> None:
    """Raise ExportError unless every island of `model` is fp32 in `written` and every other node float16."""
    kinds = {1: "tensor(float)", 10: "tensor(float16)"}
    types = {tensor.name: kinds.get(tensor.data_type, "") for tensor in written.graph.initializer}
    types |= {value.name: kinds.get(value.type.tensor_type.elem_type, "") for value in written.graph.input}
    types |= value_types(written)
    nodes = {node.name: node for node in written.graph.node}
    for node in model.graph.node:
        if not _is_float(node, values):
            continue
        found = nodes.get(node.name)
        fixed = () if node.name in islands else _FIXED_FLOAT.get(node.op_type, ())
        wanted = kinds[1 if node.name in islands else 10]
        pairs = [] if found is None else [*zip(node.output, found.output, strict=True)]
        pairs += [] if found is None else [p for at, p in enumerate(zip(node.input, found.input, strict=True))
                                           if at not in fixed]  # fmt: skip
        wrong = [types.get(now) for before, now in pairs if before in values and types.get(now) != wanted]
        if found is None or wrong:
            raise ExportError(
                f"Writing fp16 failed: {node.name} ({node.op_type}) should read and write {wanted}, and has "
                f"{wrong[0] if wrong else 'vanished'}."
            )


def _settle(
    model: onnx.ModelProto, feeds: Sequence[Feed], values: Mapping[str, Measured], islands: dict[str, str]
) -> float:
    """Emulate and add islands, in place, until the outputs are right; returns the error that is left."""
    chosen = spread(feeds, _EMULATED_FEEDS)
    names = [value.name for value in model.graph.output]
    session = _session(model, names)
    expected = [session.run(names, feed) for feed in chosen]
    costs: dict[str, float] = {}
    trouble = "nothing"
    for _ in range(_ROUNDS):
        run = emulated(model, chosen, islands=islands)
        fault = first_fault(model, run.values)
        if fault is not None:
            trouble = _described(*fault, run.values)
            more = _around(model, fault[0], values) - set(islands)
            if not more:
                break
            islands |= dict.fromkeys(more, f"float16 gives {trouble}")
            continue
        error = max(row_error(*pair) for pair in zip(expected, run.outputs, strict=True))
        if error <= ERROR_BOUND:
            return error
        costs = costs or _costs(model, spread(chosen, _ALONE_FEEDS), values, islands)
        left = sorted((name for name in costs if name not in islands), key=lambda name: costs[name], reverse=True)
        if not left:
            break
        trouble = f"an error of {error:.1%} of the output, most of it by {left[0]}"
        for name in left[: max(math.ceil(len(costs) * _SHARE_PER_ROUND), 1)]:
            islands[name] = f"by itself an error of {costs[name]:.2g} of the output"
    raise ExportError(f"float16 gives {trouble}, with {len(islands)} nodes in fp32. Use --precision fp32.")


def _costs(
    model: onnx.ModelProto, feeds: Sequence[Feed], values: Mapping[str, Measured], islands: Collection[str]
) -> dict[str, float]:
    """The output's error with each float16 node alone rounded."""
    floats = _floats(model)
    names = [value.name for value in model.graph.output]
    every = {node.name for node in model.graph.node if _is_float(node, values)}
    session = _session(model, names)
    expected = [session.run(names, feed) for feed in feeds]
    found = {}
    for name in every - set(islands):
        alone = _session(emulation(model, floats, every - {name}), names)
        found[name] = max(row_error(want, alone.run(names, feed)) for want, feed in zip(expected, feeds, strict=True))
    return found


def _around(model: onnx.ModelProto, name: str, values: Mapping[str, Measured]) -> set[str]:
    """A node and the makers of the float values that it reads."""
    node = next(node for node in model.graph.node if node.name == name)
    read = set(_reads(node)) & set(values)
    return {name, *(other.name for other in model.graph.node if read & set(other.output))}


def _reason(
    node: onnx.NodeProto, values: Mapping[str, Measured], weights: Collection[str], integers: Mapping[str, NDArray[Any]]
) -> str | None:
    """Why a node stays in fp32; None if nothing speaks for it."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    if node.op_type in DEFAULT_OP_BLOCK_LIST:
        return f"{node.op_type} has no float16 kernel everywhere"
    if inner_graphs(node):
        return f"{node.op_type} has graphs inside that are not measured"
    fixed = _FIXED_FLOAT.get(node.op_type, ())
    names = [name for at, name in enumerate(node.input) if at not in fixed]
    for name in (*names, *node.output):
        value = values.get(name)
        if value is not None and value.peak > (LARGEST if name in weights else SAFE):
            return f"{name} reaches {value.peak:.3g}"
        if value is not None and value.underflows:
            return f"{name} lies below {SMALLEST_NORMAL:.2g} by {value.tiny / value.count:.0%}"
    at = _NO_ZERO.get(node.op_type)
    divisor = None if at is None else values.get(node.input[at])
    if divisor is not None and divisor.least < SMALLEST_NORMAL:
        return f"{node.input[at or 0]} goes down to {divisor.least:.2g} and must not become 0"
    bound = inner_bound(node, values, integers)
    return f"sums inside may reach {bound:.3g}" if bound > SAFE else None


def _floors(
    model: onnx.ModelProto, values: Mapping[str, Measured], weights: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Nodes between a constant that keeps a value above zero, too small for float16, and what divides by it."""
    floored: set[str] = set()
    for node in model.graph.node:
        constants = [values[name].peak for name in node.input if name in weights and name in values]
        tiny = any(0 < peak < SMALLEST_NORMAL for peak in constants)
        carried = node.op_type in _CARRIERS and bool(node.input) and node.input[0] in floored
        at = _NO_ZERO.get(node.op_type)
        if carried or (at is not None and node.input[at] in floored):
            yield node.name, "a floor below float16 keeps what it reads above 0"
        if carried or (node.op_type in _FLOORS and tiny):
            floored.update(node.output)


def _summed(node: onnx.NodeProto, shape: tuple[int, ...], integers: Mapping[str, NDArray[Any]]) -> int:
    """How many elements each sum inside the node has, for an input of `shape`."""
    from onnx import helper

    settings = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    rank = len(shape)
    axes: Iterable[int] = range(rank)
    if node.op_type in _SPATIAL:
        axes = range(2, rank)
    elif node.op_type == "GroupNormalization":
        return math.prod(shape[1:]) // max(int(settings.get("num_groups", 1)), 1)
    elif node.op_type in _LAST_AXES:
        axes = range(int(settings.get("axis", -1)) % max(rank, 1), rank)
    elif node.op_type.startswith("Skip") or node.op_type in (*_EXPONENTIALS, "LpNormalization"):
        axes = [int(settings.get("axis", -1))]
    elif "axes" in settings:
        axes = settings["axes"]
    elif len(node.input) > 1 and node.input[1] in integers:
        axes = [int(axis) for axis in integers[node.input[1]].reshape(-1)] or range(rank)
    return math.prod(shape[axis] for axis in axes) if rank else 1


def _attention_bound(node: onnx.NodeProto, values: Mapping[str, Measured]) -> float:
    """A bound on scaled query-key products: scale * d * p_q * p_k, d channels a head."""
    settings = {item.name: item for item in node.attribute}
    query, key = (values.get(name) for name in (*node.input[:2], "")[:2])
    if query is None or not query.shape:
        return 0.0
    width = query.shape[-1] / (settings["num_heads"].i if "num_heads" in settings else 1)
    scale = settings["scale"].f if "scale" in settings else 1 / math.sqrt(width)
    return float(width * query.peak * (key or query).peak * scale)


def _few_tokens(model: onnx.ModelProto) -> list[Feed]:
    """Two texts of five tokens, all 1, if the graph reads integers only."""
    kinds = {6: np.int32, 7: np.int64}
    inputs = [(value.name, value.type.tensor_type) for value in model.graph.input]
    if not inputs or any(kind.elem_type not in kinds or len(kind.shape.dim) not in (1, 2) for _, kind in inputs):
        return []
    return [{name: np.ones((2, 5)[-len(kind.shape.dim) :], kinds[kind.elem_type]) for name, kind in inputs}]


def _long_feed(model: onnx.ModelProto, feed: Feed) -> list[Feed]:
    """One text with the tokens of `feed` (batch, sequence), as long as the graph takes; empty if it takes none."""
    if any(value.ndim != 2 for value in feed.values()):
        return []
    session = _session(model, [value.name for value in model.graph.output])
    for length in _LONG_TEXTS:
        long = {name: np.resize(value, (1, length)) for name, value in feed.items()}
        try:
            session.run(None, long)
        except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base
            raise_if_interrupted(error)
            continue
        return [long]
    return []


def _own_weights(model: onnx.ModelProto, values: Mapping[str, Measured], islands: Collection[str]) -> None:
    """Give islands their own fp32 copy of weights that float16 nodes read as well, in place."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in values}
    shared = {name for node in model.graph.node if node.name not in islands for name in node.input} & set(weights)
    made: set[str] = set()
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if node.name not in islands or name not in shared:
                continue
            node.input[at] = name + _OWN
            if name not in made:
                tensor = copy.deepcopy(weights[name])
                tensor.name = name + _OWN
                model.graph.initializer.append(tensor)
                made.add(name)


def _round_weights(half: onnx.ModelProto, originals: Mapping[str, onnx.TensorProto]) -> None:
    """Store the float16 weights as the originals rounded to nearest, in place."""
    from onnx import numpy_helper

    for tensor in half.graph.initializer:
        before = originals.get(tensor.name)
        if before is not None and (before.data_type, tensor.data_type) == (1, 10):
            tensor.CopyFrom(numpy_helper.from_array(as_float16(numpy_helper.to_array(before)), tensor.name))


def _join_islands(half: onnx.ModelProto, own: Collection[str]) -> None:
    """Take the converter's way through float16 out between fp32 values, in place; graph outputs keep their names."""
    graph = half.graph
    inputs = {value.name for value in graph.input}
    outputs = {value.name for value in graph.output}
    down = {node.output[0]: node.input[0] for node in graph.node if _made_cast(node, 10, own)}
    up = {
        node.output[0]: down[node.input[0]] for node in graph.node if _made_cast(node, 1, own) and node.input[0] in down
    }
    renamed: dict[str, str] = {}
    for output in outputs & set(up):
        if up[output] not in (*inputs, *outputs, *renamed):
            renamed[up[output]] = output
        else:
            up.pop(output)
    nodes = [node for node in graph.node if not (_made_cast(node, 1, own) and node.output[0] in up)]
    for node in nodes:
        for names in (node.input, node.output):
            joined = [up.get(name, name) if name not in outputs else name for name in names]
            names[:] = [renamed.get(name, name) for name in joined]
    read = outputs | {name for node in nodes for name in _reads(node)}
    replace_items(
        graph.node, [node for node in nodes if not (_made_cast(node, 10, own) and node.output[0] not in read)]
    )
    replace_items(graph.value_info, [])


def _made_cast(node: onnx.NodeProto, kind: int, own: Collection[str]) -> bool:
    """Whether the converter made this cast to `kind`: it is none of the graph's `own` nodes."""
    return bool(node.op_type == "Cast" and node.name not in own and node.attribute[0].i == kind)


def _cast_captured(half: onnx.ModelProto, islands: Collection[str], own: Collection[str]) -> None:
    """Give the fp32 graphs inside control flow the float16 values around them as fp32, in place."""
    from onnx import helper

    types = {}
    if any(inner_graphs(node) for node in half.graph.node):
        weights = {tensor.name for tensor in half.graph.initializer if tensor.data_type == 10}
        types = dict.fromkeys(weights, 10) | {name: 10 for node in half.graph.node
                                              if node.name not in islands and not _made_cast(node, 1, own)
                                              for name in node.output}  # fmt: skip
    made: dict[str, onnx.NodeProto] = {}
    for node in half.graph.node:
        for graph in inner_graphs(node) if node.name in islands else ():
            for name in sorted(_captured(graph) & set(types)):
                wide = f"{name}{_OWN}"
                made[name] = helper.make_node("Cast", [name], [wide], wide, to=1)
                _rename(graph, name, wide)
    half.graph.node.extend(made.values())


def _captured(graph: onnx.GraphProto) -> set[str]:
    """Names that a graph inside a node reads from around it."""
    inner = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    read = {name for node in graph.node for name in _reads(node)} | {value.name for value in graph.output}
    return read - inner - {value.name for value in graph.input}


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for inner in inner_graphs(node):
            _rename(inner, old, new)


def _sort(model: onnx.ModelProto) -> None:
    """Put every node behind those whose values it reads, in place; otherwise the order stays."""
    makers = {name: at for at, node in enumerate(model.graph.node) for name in node.output if name}
    nodes = list(model.graph.node)
    order: list[int] = []
    state: dict[int, bool] = {}
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            at = stack[-1]
            if at not in state:
                state[at] = False
                stack += [makers[name] for name in _reads(nodes[at]) if name in makers and makers[name] not in state]
                continue
            stack.pop()
            if not state[at]:
                state[at] = True
                order.append(at)
    replace_items(model.graph.node, [nodes[at] for at in order])


def _reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads, those that its graphs read from around it included."""
    return [
        name for name in (*node.input, *(name for graph in inner_graphs(node) for name in _captured(graph))) if name
    ]


def _is_float(node: onnx.NodeProto, values: Mapping[str, Measured]) -> bool:
    return any(name in values for name in (*_reads(node), *node.output))


def _weights(model: onnx.ModelProto) -> dict[str, Measured]:
    """The float32 weights."""
    from onnx import numpy_helper

    tensors = [tensor for tensor in model.graph.initializer if tensor.data_type == 1]
    return {tensor.name: summarise(numpy_helper.to_array(tensor)) for tensor in tensors}


def _floats(model: onnx.ModelProto) -> set[str]:
    """Names of the float32 values: inputs, weights and what nodes give."""
    return {
        *(tensor.name for tensor in model.graph.initializer if tensor.data_type == 1),
        *(value.name for value in model.graph.input if value.type.tensor_type.elem_type == 1),
        *(name for name, kind in value_types(model).items() if kind == "tensor(float)"),
    }


def _rounding(value: str, rounded: str) -> list[onnx.NodeProto]:
    from onnx import helper

    half = f"{rounded}__half"
    return [
        helper.make_node("Cast", [value], [half], f"{half}_cast", to=10),
        helper.make_node("Cast", [half], [rounded], f"{rounded}__back", to=1),
    ]


def _merge(found: dict[str, Measured], values: Iterable[tuple[str, Any]]) -> None:
    for name, value in values:
        new = summarise(value)
        found[name] = found[name] | new if name in found else new


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> Any:
    """The graph on the CPU as it is written, giving the values `outputs` too."""
    try:
        return cpu_session(with_outputs(model, outputs), optimise=False)
    except Exception as error:
        raise_if_interrupted(error)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(f"Writing fp16 failed: {reason[:200]}") from error


def _described(node: str, value: str, values: Mapping[str, Measured]) -> str:
    return f"{'NaN' if values[value].nan else 'infinity'} in {value} at node {node}"
