"""Graph passes on a freshly exported decoder: values to values on an onnx_ir model, nothing read from disk.

They give every decoder the project's contract: lengths come in as two numbers, `logits_positions` picks what the
head computes, the tied embedding is stored once as (vocab, hidden), rotary tables end at the context, and older
runtimes can open it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_convert.runtime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir as ir

POSITIONS = "logits_positions"
LENGTHS = ("seqlens_k", "total_sequence_length")  # as GroupQueryAttention calls its inputs 5 and 6
HEAD_NAME = "/lm_head/MatMul"
_MICROSOFT = "com.microsoft"
_EXTERNAL_FROM_BYTES = 1024


def load_graph(path: Path) -> ir.Model:
    """The model at `path`; its external data stays on disk (mapped, read when used)."""
    import onnx_ir as ir

    return ir.load(path)


def save_graph(model: ir.Model, path: Path) -> None:
    """Write `model` to `path`, tensors of 1 KiB and more into one file beside it (`<name>.data`)."""
    import onnx_ir as ir

    model.graph.sort()
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=_EXTERNAL_FROM_BYTES)


def find_head(model: ir.Model) -> ir.Node:
    """The node that multiplies by the language-model head; ExportError if there is not exactly one."""
    found = [node for node in model.graph if node.name == HEAD_NAME]
    if len(found) != 1:
        raise ExportError(
            f"The exported graph has {len(found)} nodes called {HEAD_NAME!r}, and one is needed. "
            "This exporter version writes another graph; install the version in constraints.txt."
        )
    return found[0]


def new_value(name: str, tensor: ir.TensorProtocol | None = None) -> ir.Value:
    """A named value, constant if `tensor` is given."""
    import onnx_ir as ir

    if tensor is None:
        return ir.Value(name=name)
    dims: Any = tensor.shape
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(dims), const_value=tensor)


def share_embedding(model: ir.Model) -> bool:
    """Store a tied embedding once as (vocab, hidden): the lookup gathers rows, the head multiplies transposed.

    Turns `Transpose(W) -> Gather` with `MatMul(x, W)` into `Gather(T)` and `FusedMatMul(x, T, transB)`.
    Returns whether the graph had one.
    """
    import onnx_ir as ir

    head = find_head(model)
    weight = head.inputs[1]
    if weight is None or weight.const_value is None:
        return False
    transposes = [node for node, _ in weight.uses() if node.op_type == "Transpose"]
    if not transposes:
        return False
    source = weight.const_value
    columns, rows = source.numpy().shape
    table = new_value(
        "model.embed_tokens.weight",
        ir.LazyTensor(
            _transposed(source, "model.embed_tokens.weight"),
            dtype=source.dtype,
            shape=ir.Shape((rows, columns)),
            name="model.embed_tokens.weight",
        ),
    )
    model.graph.register_initializer(table)
    for node in transposes:
        node.outputs[0].replace_all_uses_with(table)
        model.graph.remove(node, safe=True)
    fused = ir.node("FusedMatMul", [head.inputs[0], table], {"transB": 1}, domain=_MICROSOFT, name=head.name)
    replace_node(model, head, fused)
    drop_unused(model)
    return True


def _transposed(source: Any, name: str) -> Callable[[], ir.TensorProtocol]:
    def compute() -> ir.TensorProtocol:
        import numpy as np
        import onnx_ir as ir

        return ir.Tensor(np.ascontiguousarray(source.numpy().T), dtype=source.dtype, name=name)

    return compute


def replace_node(model: ir.Model, old: ir.Node, new: ir.Node) -> None:
    """Put `new` in the place of `old`, whose first output's name, type and shape it takes over."""
    before, after = old.outputs[0], new.outputs[0]
    after.name, after.type, after.shape = before.name, before.type, before.shape
    before.name = f"{before.name}/replaced"
    before.replace_all_uses_with(after, replace_graph_outputs=True)
    model.graph.insert_before(old, new)
    model.graph.remove(old, safe=True)


def drop_unused(model: ir.Model) -> None:
    """Remove initializers that no node reads."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]


def add_logits_positions(model: ir.Model) -> None:
    """Add the input `logits_positions` (int64, (kept,)): the new tokens whose logits the head computes."""
    import onnx_ir as ir

    head = find_head(model)
    hidden = head.inputs[0]
    assert hidden is not None
    positions = ir.Value(name=POSITIONS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(("kept",)))
    gather = ir.node("Gather", [hidden, positions], {"axis": 1}, name="/lm_head/positions/Gather")
    gather.outputs[0].name = "/lm_head/positions/Gather/output_0"
    gather.outputs[0].type = hidden.type
    model.graph.insert_before(head, gather)
    head.replace_input_with(0, gather.outputs[0])
    model.graph.inputs.append(positions)
    # Every value after the head has `kept` rows now; what was annotated before is stale.
    pending, logits = [head], model.graph.outputs[0]
    while pending:
        for value in pending.pop().outputs:
            if value.shape is not None and len(value.shape) == 3:
                value.shape = ir.Shape((value.shape[0], "kept", value.shape[2]))
            pending.extend(node for node, _ in value.uses())
    if logits.name != "logits":
        raise ExportError(f"The exported graph's first output is {logits.name!r}, and 'logits' is expected.")


def take_lengths(model: ir.Model) -> None:
    """Replace the input `attention_mask` by `seqlens_k` (int32 (batch,), length - 1) and `total_sequence_length` ().

    The exporter computes both from a mask of ones that grows by one with every token; as inputs of a fixed shape
    they are bound once for a whole generation, and eight operators go.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    attention = [node for node in model.graph.all_nodes() if node.op_type == "GroupQueryAttention"]
    mask = next((value for value in model.graph.inputs if value.name == "attention_mask"), None)
    if not attention or mask is None:
        raise ExportError(
            "The exported graph has no GroupQueryAttention with an attention mask. "
            "This exporter version writes another graph; install the version in constraints.txt."
        )
    for place, name, shape in ((5, LENGTHS[0], ("batch",)), (6, LENGTHS[1], ())):
        given = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(shape))
        model.graph.inputs.append(given)
        for old in {node.inputs[place] for node in attention}:
            assert old is not None
            old.replace_all_uses_with(given)
    RemoveUnusedNodesPass()(model)
    if mask.uses():
        raise ExportError("The exported graph uses the attention mask for more than lengths, which no pass knows.")
    model.graph.inputs.remove(mask)


def drop_trailing_inputs(model: ir.Model) -> None:
    """Cut empty inputs at the end of com.microsoft nodes: older runtimes refuse more inputs than they know."""
    for node in model.graph.all_nodes():
        count = len(node.inputs)
        while count and node.inputs[count - 1] is None:
            count -= 1
        if node.domain == _MICROSOFT and count < len(node.inputs):
            node.resize_inputs(count)


def fix_cache_shapes(model: ir.Model, head_dim: int) -> None:
    """Write the cache's last dim as the number it is (the exporter leaves it symbolic)."""
    import onnx_ir as ir

    for value in (*model.graph.inputs, *model.graph.outputs):
        name = value.name or ""
        if name.startswith(("past_key_values.", "present.")) and value.shape is not None:
            value.shape = ir.Shape((*tuple(value.shape)[:3], head_dim))


def trim_rotary(model: ir.Model, rows: int) -> None:
    """Cut the rotary tables (`cos_cache*`, `sin_cache*`; positions, half the rotary dim) to `rows` positions."""
    import numpy as np
    import onnx_ir as ir

    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if not name.startswith(("cos_cache", "sin_cache")) or tensor is None or tensor.numpy().shape[0] <= rows:
            continue
        cut = ir.Tensor(np.ascontiguousarray(tensor.numpy()[:rows]), dtype=tensor.dtype, name=name)
        value.const_value, value.shape = cut, ir.Shape(cut.shape)


def lower_opset(model: ir.Model, opset: int) -> None:
    """Declare `opset` if every operator in the graph means the same there; ExportError names one that does not."""
    from onnx import defs

    written = model.graph.opset_imports[""]
    if written <= opset:
        return
    for node in model.graph.all_nodes():
        # ONNX Runtime has operators of its own in the default domain, such as SimplifiedLayerNormalization.
        if node.domain in ("", "ai.onnx") and defs.has(node.op_type):
            since = defs.get_schema(node.op_type, written).since_version
            if since > opset and not _same_form(node.op_type, opset, written):
                raise ExportError(
                    f"The exported graph uses {node.op_type} of opset {since}, and the target reads at most {opset}. "
                    "Choose a target with a newer ONNX Runtime."
                )
    model.graph.opset_imports[""] = opset


def _same_form(op_type: str, opset: int, written: int) -> bool:
    """Whether the newer version only allows more types (bfloat16): same inputs, outputs and attributes."""
    from onnx import defs

    try:
        old, new = defs.get_schema(op_type, opset), defs.get_schema(op_type, written)
    except defs.SchemaError:
        return False

    def form(schema: Any) -> tuple[object, ...]:
        return (
            [(item.name, item.option) for item in schema.inputs],
            [(item.name, item.option) for item in schema.outputs],
            sorted((key, str(item.type), item.required) for key, item in schema.attributes.items()),
        )

    return form(old) == form(new)
