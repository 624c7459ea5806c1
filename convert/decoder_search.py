"""`--precision auto` of a decoder: all int4, int4 with the costliest layers in int8, all int8, parts in fp32.

What a layer costs is measured: the KL divergence of the logits, with that layer alone quantised, on texts that
never judge the bundle. Layers go back to the wider format by what that saves for each byte that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_convert.convert import decoder_passes as passes
from edge_convert.convert.decoder_probe import Probe
from edge_convert.convert.decoder_quantize import (
    COARSE_TABLE,
    INT4_AGAIN,
    INT4_FINE,
    INT8,
    WeightPlan,
    first_that_fits,
    layers_on_grid,
    linear_layers,
    quantise_graph,
    rows_of,
    rows_shape,
    uniform_plan,
)
from edge_convert.convert.recipe import Exported
from edge_convert.convert.search import Build, Graphs, Search, Trial, drawn_in
from edge_convert.convert.weight_formats import WeightFormat, dequantise_rows, stored_bytes
from edge_convert.validate import metrics

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Formats = tuple[WeightFormat, ...]

_FP32_SHARES = (1 / 16, 1 / 4)  # of the layers
_COST_TEXTS = 2  # the texts that one layer's cost is measured on


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares a decoder graph with the original on `texts` (ids int64 (S,)), whose logits are `expected`."""

    texts: Sequence[Ids]
    expected: Sequence[Floats]

    def measure(self, graphs: Graphs) -> dict[str, float]:
        """Mean KL divergence in nats, share of equal first tokens, and the perplexity's ratio."""
        probe = Probe(graphs["decoder"])
        return self.compare([probe.logits(ids) for ids in self.texts])

    def compare(self, found: Sequence[Floats]) -> dict[str, float]:
        """The same for logits that were computed before, one array (S, vocabulary) for each of the first texts."""
        pairs = list(zip(self.expected, found, strict=False))
        kl = np.concatenate([metrics.kl_divergence(a, b) for a, b in pairs])
        same = np.concatenate([np.argmax(a, axis=-1) == np.argmax(b, axis=-1) for a, b in pairs])
        nll = [
            np.concatenate(
                [metrics.negative_log_likelihood(pair[side], ids) for pair, ids in zip(pairs, self.texts, strict=False)]
            )
            for side in (0, 1)
        ]
        return {
            "kl_mean": float(kl.mean()),
            "top1_agreement": float(same.mean()),
            "perplexity_ratio": metrics.perplexity(nll[1]) / metrics.perplexity(nll[0]),
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """What quantising one layer alone costs: KL divergence in nats, and the bytes that it takes."""

    kl: float
    bytes: int


def search_decoder(search: Search, source: Exported, judge: Judge, *, accuracy_level: int) -> Trial:
    """Try candidates from the cheapest until one is within the bounds; returns the best that was found.

    `source` is the graph in fp32; every candidate is built from it. Where its weights lie on a 4-bit grid, rounding them
    again is measured too, so that the record has what keeping the grid is worth.
    """

    def attempt(name: str, plan: WeightPlan) -> Trial:
        return search.attempt(name, _build(source, plan), judge.measure)

    model = passes.load_graph(source.path)
    coarse = attempt("int4", uniform_plan("int4", model, accuracy_level))
    if count := layers_on_grid(model):
        again = attempt("int4, rounded to nearest again", WeightPlan(INT4_AGAIN, COARSE_TABLE, accuracy_level))
        search.notes.append(_routes(count, len(list(linear_layers(model))), coarse, again))
        if not coarse.refused and not again.refused:
            search.pass_over(again, "the source's own grid is kept, which is exact")
    if not coarse.refused:
        return coarse
    fine = attempt("int4, finer blocks", WeightPlan(INT4_FINE, COARSE_TABLE, accuracy_level))
    if not fine.refused:
        return fine
    int8 = attempt("int8", uniform_plan("int8", model, accuracy_level))
    if not int8.refused:
        order, left = _order(search, source, judge, INT4_FINE, INT8)

        def mixed(count: int) -> Trial:
            nodes = dict.fromkeys(order[:count], INT8)
            name = f"int4, {count} of {len(order)} layers in int8"
            return attempt(name, WeightPlan(INT4_FINE, COARSE_TABLE, accuracy_level, nodes))

        _fewest(mixed, _expected_count(search, fine, int8, left), len(order))
        return search.best()
    if accuracy_level:
        exact = attempt("int8, activations in fp32", uniform_plan("int8", model, 0))
        if not exact.refused:
            return exact
    order, _ = _order(search, source, judge, INT8, None)
    for share in _FP32_SHARES:
        count = math.ceil(share * len(order))
        plan = WeightPlan(INT8, COARSE_TABLE, 0, dict.fromkeys(order[:count]))
        trial = attempt(f"int8, {count} of {len(order)} layers in fp32", plan)
        if not trial.refused:
            return trial
    return search.best()


def node_costs(search: Search, source: Exported, judge: Judge, forms: Formats) -> dict[str, Cost]:
    """What each linear layer costs alone in the first of `forms` that it can have, by its name in the graph."""
    model = passes.load_graph(source.path)
    layers = list(linear_layers(model))
    probe: Probe | None = None
    costs: dict[str, Cost] = {}
    few = judge.texts[:_COST_TEXTS]
    for done, node in enumerate(layers, start=1):
        name, key = str(node.name), f"cost {node.name} {forms[-1]}"
        if key in search.journal:
            costs[name] = Cost(**search.journal.get(key))
            continue
        if probe is None:
            probe = Probe(source, [str(layer.inputs[1].name) for layer in layers if layer.inputs[1] is not None])
        if done % 10 == 1:
            search.progress(f"measuring what each layer costs in int{forms[-1].bits}: {done} of {len(layers)}")
        rows = rows_of(node)
        _, blocks = first_that_fits(rows, forms)
        assert node.inputs[1] is not None
        weights = {str(node.inputs[1].name): np.ascontiguousarray(dequantise_rows(blocks, rows.shape[1]).T)}
        found = judge.compare([probe.logits(ids, weights) for ids in few])
        costs[name] = Cost(found["kl_mean"], stored_bytes(blocks))
        search.journal.put(key, {"kl": costs[name].kl, "bytes": costs[name].bytes})
    return costs


def _order(
    search: Search, source: Exported, judge: Judge, forms: Formats, wider: Formats | None
) -> tuple[list[str], list[float]]:
    """The layers by what going from `forms` to `wider` (None: fp32) saves for each byte it takes, most first; and the
    share of all layers' cost that is left when the first n of them went, by n."""
    costs = node_costs(search, source, judge, forms)
    search.costs = {name: cost.kl for name, cost in costs.items()}
    gains = {}
    for node in linear_layers(passes.load_graph(source.path)):
        name, values = str(node.name), math.prod(rows_shape(node))
        bits = 32.0 if wider is None else wider[-1].bits + 16 / wider[-1].block
        gains[name] = costs[name].kl / max(values * bits / 8 - costs[name].bytes, 1)
    order = sorted(gains, key=gains.__getitem__, reverse=True)
    kl = np.array([costs[name].kl for name in order])
    left = 1 - np.concatenate([[0.0], np.cumsum(kl)]) / max(float(kl.sum()), 1e-12)
    return order, left.tolist()


def _expected_count(search: Search, fine: Trial, int8: Trial, left: Sequence[float]) -> int:
    """How many layers in int8 should do, if the costs of the others add up to what all int4 costs over all int8."""
    name = "kl_mean_max"
    if name not in search.bounds:
        return len(left) // 2
    room = drawn_in(name, search.bounds[name]) - int8.metrics["kl_mean"]
    whole = max(fine.metrics["kl_mean"] - int8.metrics["kl_mean"], 1e-12)
    return next((count for count, share in enumerate(left) if share * whole <= room), len(left) - 1)


def _fewest(attempt: Callable[[int], Trial], guess: int, most: int) -> None:
    """Try counts between 0 (refused) and `most` (within the bounds), `guess` first, until about the fewest is found."""
    low, high, step = 0, most, max(1, most // 16)
    count = min(max(guess, 1), most - 1)
    while high - low > max(1, most // 40):
        if attempt(count).refused:
            low = count
            count = min(count + step, (low + high) // 2) if high == most else (low + high) // 2
        else:
            high = count
            count = max(count - step, (low + high) // 2) if low == 0 else (low + high) // 2
        step *= 2
        if count in (low, high):
            break


def _routes(count: int, total: int, kept: Trial, again: Trial) -> str:
    """What the two ways to int4 cost where the weights were quantised before."""
    return (
        f"{count} of {total} layers of the source lie on a 4-bit grid. KL divergence on calibration texts: "
        f"{kept.metrics['kl_mean']:.4g} with that grid kept ({kept.bytes / 1e6:.1f} MB), "
        f"{again.metrics['kl_mean']:.4g} rounded to nearest again ({again.bytes / 1e6:.1f} MB)."
    )


def _build(source: Exported, plan: WeightPlan) -> Build:
    """How to write the graph of `plan` into a folder."""

    def build(folder: Path) -> Graphs:
        model = passes.load_graph(source.path)
        quantise_graph(model, plan)
        path = folder / source.path.name
        passes.save_graph(model, path)
        return {"decoder": Exported(path, source.cache)}

    return build
