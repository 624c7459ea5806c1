"""Decoding one model side by side: edge-convert, onnxruntime-genai, transformers and llama.cpp.

    python benchmarks/decoders.py BUNDLE MODEL.gguf [--threads 2] [--repeats 5] [--tokens 128]

All runners get the same prompt ids, thread count and number of new tokens, decode greedily and do not
stop at an end token. They take turns (one repeat of each, then the next), so that a slow moment of the
machine meets all of them, and the medians are reported; ratios are medians over the repeats, each beside its
own. onnxruntime-genai runs twice: the bundle's own graph (equal work, so loop against loop), and the graph
that its builder makes from the same weights at the bundle's precision. llama.cpp runs the GGUF as it is.

Prints a table and one JSON line. Needs the extra `convert` and `xllamacpp`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

from edge_convert.convert.decoder_passes import LENGTHS, POSITIONS
from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.generate import Decoder, generate
from edge_convert.runtime.sampling import GenerationConfig
from edge_convert.runtime.threads import available_cpus
from edge_convert.wrappers.text import TextGenerator

PROMPT = (
    "A small delivery robot waits at the corner of a quiet street. Its camera sees a cyclist, two parked cars and a "
    "dog without a leash. Describe step by step what the robot should do next, and why."
)
OURS = "edge-convert"
PAUSE_S = 0.3  # the thread pool of the runner before stops spinning


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation: time to the first token, time of all tokens after it, and (ours) time beside session.run."""

    ttft_ms: float
    decode_tokens_per_s: float
    overhead_ms_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Competitor:
    """A loaded model: `run(ids, tokens)` generates exactly `tokens` tokens after `ids`."""

    name: str
    precision: str
    version: str
    run: Callable[[list[int], int], Sample]


def sample_of(start: float, stamps: list[float], overhead_ms: float | None = None) -> Sample:
    """From the start and the time at which each token was there (seconds)."""
    decode_s = stamps[-1] - stamps[0]
    return Sample((stamps[0] - start) * 1e3, (len(stamps) - 1) / decode_s, overhead_ms)


class TimedSession:
    """Passes everything on to an onnxruntime.InferenceSession and adds up the time inside its runs."""

    def __init__(self, ort: Any) -> None:
        self.ort = ort
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ort, name)

    def run(self, *args: Any) -> Any:
        return self._timed(self.ort.run, *args)

    def run_with_iobinding(self, *args: Any) -> Any:
        return self._timed(self.ort.run_with_iobinding, *args)

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - start


def ours(bundle: Bundle, threads: int) -> Competitor:
    session = bundle.session("decoder", threads=threads)
    timed = TimedSession(session.ort)
    session.ort = timed
    decoder = Decoder(session)

    def run(ids: list[int], tokens: int) -> Sample:
        decoder.reset()
        stamps, inside = [], []
        start = time.perf_counter()
        for _ in generate(decoder, ids, GenerationConfig(max_tokens=tokens)):
            stamps.append(time.perf_counter())
            inside.append(timed.seconds)
        if len(stamps) != tokens:
            sys.exit(f"The bundle's context holds {len(stamps)} of {tokens} tokens. Ask for fewer with --tokens.")
        beside = (stamps[-1] - stamps[0]) - (inside[-1] - inside[0])
        return sample_of(start, stamps, beside * 1e3 / (len(stamps) - 1))

    return Competitor(OURS, bundle.manifest.precision, metadata.version("onnxruntime"), run)


def build_genai(checkpoint: Path, work: Path, precision: str) -> Path:
    """The folder that onnxruntime-genai's own builder makes of the weights."""
    folder = work / "genai"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(folder)]
    command += ["-p", precision, "-e", "cpu", "-c", str(work / "cache")]
    if precision in ("int4", "int8"):
        command += ["--extra_options", "accuracy_level=4", "block_size=32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"The onnxruntime-genai builder failed:\n{done.stderr[-2000:]}")
    return folder


def our_graph_for_genai(bundle: Bundle, built: Path, folder: Path) -> Path:
    """The bundle's graph in a folder for onnxruntime-genai, with the configuration that its builder wrote.

    onnxruntime-genai gives a growing attention mask and asks for the last token's logits, so the few operators
    that turn the one into lengths and pick the other are put in front.
    """
    import onnx
    from onnx import TensorProto, helper

    spec = bundle.manifest.graphs["decoder"]
    folder.mkdir()
    for file in built.iterdir():
        if file.name.startswith(("genai_config", "tokenizer", "chat_template")):
            shutil.copy(file, folder)
    model = onnx.load(bundle.file(spec.file), load_external_data=False)
    graph = model.graph
    kept = [value for value in graph.input if value.name not in (*LENGTHS, POSITIONS)]
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total_sequence"])
    del graph.input[:]
    graph.input.extend([*kept, mask])
    constants = {"genai.one": [1], "genai.axis": [1], "genai.axis0": [0]}
    graph.initializer.extend(helper.make_tensor(name, TensorProto.INT64, [1], at) for name, at in constants.items())
    front = [
        helper.make_node("ReduceSum", ["attention_mask", "genai.axis"], ["genai.sum"], keepdims=0),
        helper.make_node("Sub", ["genai.sum", "genai.one"], ["genai.last"]),
        helper.make_node("Cast", ["genai.last"], [LENGTHS[0]], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["genai.total"], start=1, end=2),
        helper.make_node("Squeeze", ["genai.total", "genai.axis0"], ["genai.length"]),
        helper.make_node("Cast", ["genai.length"], [LENGTHS[1]], to=TensorProto.INT32),
        helper.make_node("Shape", ["input_ids"], ["genai.count"], start=1, end=2),
        helper.make_node("Sub", ["genai.count", "genai.one"], [POSITIONS]),
    ]
    nodes = [*front, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, folder / "model.onnx")
    data = f"{spec.file}.data"
    shutil.copy(bundle.file(data), folder / data)
    return folder


def genai(name: str, folder: Path, precision: str, threads: int) -> Competitor:
    """A folder in onnxruntime-genai's form, run by its own loop."""
    import onnxruntime_genai as og

    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    file.write_text(json.dumps(config))
    model = og.Model(str(folder))

    def run(ids: list[int], tokens: int) -> Sample:
        params = og.GeneratorParams(model)
        total = len(ids) + tokens
        params.set_search_options(do_sample=False, min_length=total, max_length=total)
        generator = og.Generator(model, params)
        stamps = []
        start = time.perf_counter()
        generator.append_tokens(np.array(ids, np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            generator.get_next_tokens()
            stamps.append(time.perf_counter())
        return sample_of(start, stamps)

    return Competitor(name, precision, og.__version__, run)


def transformers_cpu(checkpoint: Path, threads: int) -> Competitor:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    class Clock:
        """A streamer of transformers: notes when each token came (the first call is the prompt)."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def put(self, _: Any) -> None:
            self.stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(ids: list[int], tokens: int) -> Sample:
        clock = Clock()
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                streamer=clock,
            )
        return sample_of(start, clock.stamps[1:])

    return Competitor("transformers", "fp32", f"{transformers.__version__}, torch {torch.__version__}", run)


def llama_cpp(gguf: Path, threads: int, context: int) -> Competitor:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = context
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.verbosity = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(ids: list[int], tokens: int) -> Sample:
        request = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(request)
        timings = (json.loads(answer) if isinstance(answer, str | bytes) else answer)["timings"]
        if timings["predicted_n"] != tokens or timings["prompt_n"] != len(ids):
            sys.exit(f"llama.cpp did other work than was asked for: {timings}")
        return Sample(timings["prompt_ms"], timings["predicted_per_second"])

    return Competitor("llama.cpp", "the GGUF's", metadata.version("xllamacpp"), run)


def checkpoint_of(gguf: Path, folder: Path) -> Path:
    """The GGUF's weights as an fp32 Hugging Face folder, for the runners that need one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one that says it is not quantised
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def measure(runners: list[Competitor], ids: list[int], *, tokens: int, repeats: int) -> dict[str, list[Sample]]:
    """`repeats` samples of each runner in turns, after one warm-up each that does not count."""
    samples: dict[str, list[Sample]] = {runner.name: [] for runner in runners}
    for repeat in range(repeats + 1):
        for runner in runners:
            time.sleep(PAUSE_S)
            sample = runner.run(ids, tokens)
            if repeat:
                samples[runner.name].append(sample)
    return samples


def summary(runner: Competitor, samples: list[Sample], our_samples: list[Sample]) -> dict[str, Any]:
    """One row: medians, and how ours compares in the median repeat."""
    speeds = [sample.decode_tokens_per_s for sample in samples]
    overheads = [sample.overhead_ms_per_token for sample in samples if sample.overhead_ms_per_token is not None]
    pairs = list(zip(our_samples, samples, strict=True))
    return {
        "runner": runner.name,
        "precision": runner.precision,
        "version": runner.version,
        "ttft_ms": round(statistics.median(sample.ttft_ms for sample in samples), 2),
        "decode_tokens_per_s": round(statistics.median(speeds), 2),
        "decode_tokens_per_s_range": [round(min(speeds), 2), round(max(speeds), 2)],
        "overhead_ms_per_token": round(statistics.median(overheads), 4) if overheads else None,
        "our_decode_ratio": round(
            statistics.median(a.decode_tokens_per_s / b.decode_tokens_per_s for a, b in pairs), 3
        ),
        "our_ttft_ratio": round(statistics.median(a.ttft_ms / b.ttft_ms for a, b in pairs), 3),
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, box=rich.box.SIMPLE_HEAD)
    table.add_column("runner")
    for heading in (
        "precision",
        "decode\ntokens/s",
        "range",
        "our decode\nis ×",
        "first token\nms",
        "our first\nis ×",
        "loop\nms/token",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row["decode_tokens_per_s_range"]
        overhead = row["overhead_ms_per_token"]
        table.add_row(
            row["runner"],
            row["precision"],
            f"{row['decode_tokens_per_s']:.1f}",
            f"{low:.0f}-{high:.0f}",
            f"{row['our_decode_ratio']:.2f}",
            f"{row['ttft_ms']:.1f}",
            f"{row['our_ttft_ratio']:.2f}",
            "-" if overhead is None else f"{overhead:.3f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding speed beside onnxruntime-genai, transformers and llama.cpp")
    parser.add_argument("bundle", type=Path, help="a text-generation bundle made from GGUF for the target cpu")
    parser.add_argument("gguf", type=Path, help="the model that the bundle was made from")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    if options.tokens < 2 or options.repeats < 1 or options.threads < 1:
        parser.error("--tokens must be at least 2, --repeats and --threads at least 1")

    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    bundle = Bundle.open(options.bundle)
    precision = bundle.manifest.precision
    ids = TextGenerator.load(bundle, threads=options.threads).encode(options.prompt)
    with tempfile.TemporaryDirectory(prefix="edge-convert-bench-") as name:
        work = Path(name)
        checkpoint = checkpoint_of(options.gguf.resolve(), work / "checkpoint")
        built = build_genai(checkpoint, work, precision)
        ours_for_genai = our_graph_for_genai(bundle, built, work / "genai-ours")
        runners = [
            ours(bundle, options.threads),
            genai("genai, our graph", ours_for_genai, precision, options.threads),
            genai("genai, its graph", built, precision, options.threads),
            llama_cpp(options.gguf.resolve(), options.threads, len(ids) + options.tokens + 16),
            transformers_cpu(checkpoint, options.threads),
        ]
        samples = measure(runners, ids, tokens=options.tokens, repeats=options.repeats)

    rows = [summary(runner, samples[runner.name], samples[OURS]) for runner in runners]
    title = f"{bundle.manifest.source.name}, {len(ids)} prompt tokens, {options.tokens} new, {options.threads} threads"
    show(rows, title)
    setting = {"prompt_tokens": len(ids), "new_tokens": options.tokens, "threads": options.threads}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "repeats": options.repeats}
    print(json.dumps({"model": bundle.manifest.source.name, **setting, **machine, "runners": rows}))


if __name__ == "__main__":
    main()
