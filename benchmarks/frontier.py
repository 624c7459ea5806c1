"""Size, speed and accuracy of one language model's weight formats, measured side by side in one run.

    python benchmarks/frontier.py SOURCE [--blur] [--repeats 7]

SOURCE is a GGUF file or a Hugging Face folder. Every row is a graph made from the same fp32 export and compared with
the original in fp32 on validation's texts; decoding takes turns, one repeat of each, and medians are reported.
`--blur` adds uniform noise of one step to weights that lie on a 4-bit grid: a stand-in for the checkpoint before it was
quantised. Prints a Markdown table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from edge_convert.convert import decoder_passes as passes
from edge_convert.convert.chatter import captured
from edge_convert.convert.decoder_probe import Probe
from edge_convert.convert.decoder_quantize import (
    COARSE_TABLE,
    INT4_FINE,
    INT8,
    WeightPlan,
    halve_weights,
    linear_layers,
    quantise_graph,
    rows_of,
    uniform_plan,
)
from edge_convert.convert.decoder_search import Judge
from edge_convert.convert.export_cache import cached_export
from edge_convert.convert.recipe import Exported, Request
from edge_convert.convert.recipes.text_generation import RECIPE
from edge_convert.convert.search import graph_bytes
from edge_convert.convert.source import open_source
from edge_convert.convert.stamp import read_back
from edge_convert.convert.weight_formats import WeightFormat, quantise_rows
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.generate import Decoder
from edge_convert.runtime.session import Session
from edge_convert.validate.texts import long_texts

TOKENS, TEXTS, STEPS, PROMPT = 128, 12, 40, 40
NEAREST = (WeightFormat(4, 32, "nearest"),)
SHRINK = (WeightFormat(4, 32, "shrink"),)
COARSE = (WeightFormat(4, 64, "shrink"),)
HQQ = (WeightFormat(4, 32, "hqq"),)


def plans(model: Any, level: int) -> dict[str, WeightPlan | str]:
    """The rows by name: plans, or the name of a wider precision."""
    names = [str(node.name) for node in linear_layers(model)]
    down = {name: INT8 for name in names if "/down_proj/" in name}
    wide = {name: INT8 for name in names if "/down_proj/" in name or "/o_proj/" in name or "/qkv_proj/" in name}
    return {
        "int4, block 64": WeightPlan(COARSE, COARSE_TABLE, level),
        "int4, nearest, block 32": WeightPlan(NEAREST, COARSE_TABLE, level),
        "int4, least squares, block 32": WeightPlan(SHRINK, COARSE_TABLE, level),
        "int4, HQQ, block 32": WeightPlan(HQQ, COARSE_TABLE, level),
        "int4 as `--precision int4` writes it": uniform_plan("int4", model, level),
        "int4, down_proj in int8": WeightPlan(INT4_FINE, COARSE_TABLE, level, down),
        "int4, all but gate and up in int8": WeightPlan(INT4_FINE, COARSE_TABLE, level, wide),
        "int8": uniform_plan("int8", model, level),
        "fp16 stored, fp32 computed": "fp16",
        "fp32": "fp32",
    }


def write(source: Exported, plan: WeightPlan | str, folder: Path) -> Exported:
    """The graph of `plan` in `folder`."""
    folder.mkdir()
    model = passes.load_graph(source.path)
    if isinstance(plan, WeightPlan):
        quantise_graph(model, plan)
    elif plan == "fp16":
        halve_weights(model)
    path = folder / source.path.name
    passes.save_graph(model, path)
    return Exported(path, source.cache)


def blur(path: Path) -> int:
    """Add noise within half a step to every linear weight that lies on a 4-bit grid; the graph is written beside `path`
    as blurred_NAME. Returns how many were changed."""
    import onnx_ir as ir

    model = passes.load_graph(path)
    rng = np.random.default_rng(0)
    changed = 0
    for node in linear_layers(model):
        rows, weight = rows_of(node), node.inputs[1]
        blocks = quantise_rows(rows, WeightFormat(4, 32, "grid"))
        if blocks is None or weight is None:
            continue
        noise = rng.uniform(-0.5, 0.5, (*blocks.scales.shape, blocks.block)) * blocks.scales[:, :, None]
        noisy = rows + noise.reshape(len(rows), -1)[:, : rows.shape[1]].astype(np.float32)
        weight.const_value = ir.tensor(np.ascontiguousarray(noisy.T), name=weight.name)
        changed += 1
    passes.save_graph(model, path.with_name(f"blurred_{path.name}"))
    return changed


def token_ms(decoder: Decoder, ids: np.ndarray[Any, Any]) -> float:
    """Median milliseconds of one decode step."""
    decoder.reset()
    token = int(np.argmax(decoder.prefill(ids)))
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        token = int(np.argmax(decoder.step(token)))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--blur", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    profile = load_profile("cpu")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "export").mkdir()
        with captured(work / "libraries.log"):
            request = Request(open_source(str(options.source)), profile, "fp32", None, None, lambda _: None)
            graph = cached_export(request, RECIPE, work / "export")["decoder"]
            original = RECIPE.reference(request)
        texts = [np.asarray(original.tokenize(text)[:TOKENS], np.int64) for text in long_texts(TEXTS)]  # type: ignore[union-attr]
        if options.blur:
            blur(graph.path)
            graph = Exported(graph.path.with_name(f"blurred_{graph.path.name}"), graph.cache)
        probe = Probe(graph)
        judge = Judge(texts, [probe.logits(ids) for ids in texts])
        del probe, original
        rows: dict[str, dict[str, Any]] = {}
        decoders: dict[str, Decoder] = {}
        for index, (label, plan) in enumerate(plans(passes.load_graph(graph.path), profile.accuracy_level).items()):
            with captured(work / "libraries.log"):
                made = write(graph, plan, work / str(index))
            rows[label] = {"weights": label, "mb": graph_bytes(made) / 1e6, **judge.measure({"decoder": made})}
            decoders[label] = Decoder(Session(made.path, read_back(made.path, made.cache), profile))
        samples: dict[str, list[float]] = {label: [] for label in rows}
        for repeat in range(options.repeats + 1):
            for label, decoder in decoders.items():
                taken = token_ms(decoder, texts[0][:PROMPT])
                if repeat:  # the first turn warms up
                    samples[label].append(taken)
        for label, row in rows.items():
            row["token_ms"] = statistics.median(samples[label])
            row["time_of_int8"] = statistics.median(a / b for a, b in zip(samples[label], samples["int8"], strict=True))
    print("| weights | graph, MB | KL, nats | top-1 | perplexity × | ms a token | time of int8 × |")
    print("|---|---|---|---|---|---|---|")
    for row in rows.values():
        figures = f"{row['kl_mean']:.2g} | {row['top1_agreement']:.3f} | {row['perplexity_ratio']:.3f}"
        print(f"| {row['weights']} | {row['mb']:.1f} | {figures} | {row['token_ms']:.2f} | {row['time_of_int8']:.2f} |")
    print(json.dumps(list(rows.values())))


if __name__ == "__main__":
    main()
