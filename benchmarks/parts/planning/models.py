"""The planner on captured models at published batch sizes: overhead, bound, seconds, and against √n and per-block checkpointing."""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.lib.results import path_of, provenance, read_results, write_results
from benchmarks.models.peers import PEERS, Peer, _is_block
from memfit.capture.inputs import Call
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.pipeline.capture import capture
from memfit.planning import Progress, plan
from memfit.planning.cuts.just_in_time import keep_at, turning_point
from memfit.planning.model.fast_judge import peak_and_time, usage_of
from memfit.planning.model.reduce import Ints, Model, build_model
from memfit.planning.search.auto import Portfolio
from memfit.profile.roofline import roofline

SHARES = (0.8, 0.6, 0.5, 0.4, 0.33, 0.25, 0.2, 0.17)
PROTOTYPE_GAPS = {
    "resnet50": (0.0, 0.0, 0.05, 0.03, 0.07, 0.9),
    "unet": (0.0, 0.01, 0.02, 0.23, 1.5, 8.5),
    "googlenet": (0.06, 0.16, 0.3, 0.54, 0.98, 2.1),
    "mobilenet_v2": (0.01, 0.02, 0.02, 0.01, 0.01, 0.2),
    "gpt2": (0.0, 0.0, 0.25),
}
"""Gaps of the prototype this planner was built after, at the first of SHARES: its plans minus its bounds, in points."""
ENOUGH_POINTS = 0.005
"""The gap at which a search stops: `auto`'s own 0.3 points would hide what is compared with the prototype's gaps."""
COLUMNS = (
    "model",
    "ops",
    "forms",
    "budget",
    "status",
    "overhead_points",
    "bound_points",
    "gap_points",
    "prototype_gap",
    "first_s",
    "seconds",
    "against",
)
_TEXT = (
    "Captured on fake tensors, roofline H200 costs, no operator variants. The budget is a share of the keep-all peak above what the caller "
    "holds (parameters, buffers, inputs). Rows with `against` plan at exactly the peak of another method: `other_points` is that method's "
    "overhead judged by the same judge. `prototype_gap` is the gap of the prototype this planner was built after. Kernels were compiled "
    "before; other work shared the two cores, so seconds are upper limits. Every search was asked for a gap of 0.005 points "
    "(`Portfolio(enough_points=0.005)`; `auto` by itself stops at 0.3). Rows may be from earlier runs: each raw row names its commit and command."
)


def captured(peer: Peer) -> tuple[Graph, Costs, float]:
    """The joint graph, its costs and the seconds it took."""
    begin = time.perf_counter()
    model = peer.build()
    inputs = peer.inputs("cpu", 1.0)
    targets = peer.targets("cpu", 1.0) or inputs
    context = torch.autocast("cpu", torch.bfloat16) if peer.autocast else contextlib.nullcontext()
    with context:
        found = capture(model, Call.flatten((*inputs, *targets), {}), loss_fn=peer.loss, num_targets=len(targets))
    return found.graph, roofline(found, "h200"), time.perf_counter() - begin


def per_block(model: Model, peer: Peer) -> Ints:
    """Keep what crosses a block's border, and everything outside blocks: torch.utils.checkpoint on each block."""
    names = [n for n, m in peer.build().named_modules() if _is_block(n, m, peer.blocks)]
    turn = turning_point(model, usage_of(model.arrays, np.array(model.agenda, np.int64)))

    def block(form: int) -> str | None:
        path = model.graph.ops[model.forms[form][0]].where.split(",")[0].strip()
        return next((n for n in names if path == n or path.startswith(n + ".")), None)

    home: dict[int, str | None] = {}
    keep: set[int] = set()
    for f in model.agenda[: turn + 1]:
        here = block(f)
        keep.update(s for s in model.ins[f] if s in home and home[s] != here)
        for s in model.outs[f]:
            home[s] = here
    keep.update(s for s, here in home.items() if here is None)
    return keep_at(model, [turn], [keep])


def row(peer: Peer, model: Model, limit: int, label: str, seconds: float, base: tuple[int, int]) -> dict[str, Any]:
    first: list[float] = []

    def listen(progress: Progress) -> None:
        if progress.best_time_ns is not None and not first:
            first.append(progress.seconds)

    planner = Portfolio(enough_points=ENOUGH_POINTS)
    outcome = plan(model.graph, model.costs, limit, planner=planner, time_limit_s=seconds, progress=listen)
    points = lambda t: round(100 * (t / base[1] - 1), 2)  # noqa: E731
    overhead = points(outcome.plan.timeline.time_ns) if outcome.plan else ""
    bound = points(outcome.lower_bound_ns)
    return {
        "model": peer.name,
        "ops": len(model.graph.ops),
        "forms": model.num_forms,
        "budget": label,
        "status": str(outcome.status),
        "overhead_points": overhead,
        "bound_points": bound,
        "gap_points": round(overhead - bound, 2) if overhead != "" else "",
        "prototype_gap": "",
        "first_s": round(first[0], 2) if first else "",
        "seconds": round(outcome.seconds, 2),
        "against": "",
        "other_points": "",
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "reason": outcome.reason[:160],
    }


def rows_of(peer: Peer, seconds: float) -> Iterator[dict[str, Any]]:
    graph, costs, took = captured(peer)
    model = build_model(graph, costs)
    a = model.arrays
    peak, base_time = peak_and_time(a, np.array(model.agenda, np.int64))
    held = int(a.base_bytes + a.size[a.source].sum())
    print(f"{peer.name}: {len(graph.ops)} ops, {model.num_forms} forms, captured in {took:.1f} s", file=sys.stderr)
    for share in SHARES:
        known = dict(zip(SHARES, PROTOTYPE_GAPS.get(peer.name, ()), strict=False))
        found = row(peer, model, int(held + share * (peak - held)), f"{share:.0%}", seconds, (peak, base_time))
        yield {**found, "prototype_gap": known.get(share, "")}
    others = {"per-block checkpointing": per_block(model, peer)} if peer.blocks != ("pool-blocks",) else {}
    for name, sequence in others.items():
        other_peak, other_time = peak_and_time(a, sequence)
        label = f"{(other_peak - held) / (peak - held):.1%}"
        yield {
            **row(peer, model, other_peak, label, seconds, (peak, base_time)),
            "against": name,
            "other_points": round(100 * (other_time / base_time - 1), 2),
        }
    for num in (8,):
        yield from _against_segments(peer, model, num, seconds, held, peak, base_time)


def _against_segments(peer: Peer, model: Model, num: int, seconds: float, held: int, peak: int, base_time: int) -> Iterator[dict[str, Any]]:
    from memfit.planning.baselines.sqrt_segments import bytes_made, segments_sequence

    turn = turning_point(model, usage_of(model.arrays, np.array(model.agenda, np.int64)))
    other_peak, other_time = peak_and_time(model.arrays, segments_sequence(model, turn, bytes_made(model, turn), num))
    yield {
        **row(peer, model, other_peak, f"{(other_peak - held) / (peak - held):.1%}", seconds, (peak, base_time)),
        "against": f"{num} segments (Chen)",
        "other_points": round(100 * (other_time / base_time - 1), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(PEERS)}; all without")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit for each budget")
    parser.add_argument(
        "--keep", action="store_true", help="keep the other models' rows of the last run, each with its own commit and command"
    )
    options = parser.parse_args()
    rows = []
    last = read_results(path_of("planning_models"))[1] if options.keep else []
    for name in dict.fromkeys((*(found["model"] for found in last), *(options.models or PEERS))):
        if options.models and name not in options.models:
            rows += [found for found in last if found["model"] == name]
            continue
        for found in rows_of(PEERS[name], options.seconds):
            print({k: v for k, v in found.items() if k != "reason"}, file=sys.stderr, flush=True)
            rows.append(found)
    write_results(
        "planning_models",
        title="Planner: captured models",
        text=_TEXT,
        columns=(*COLUMNS, "other_points", "peak_rss_mib", "reason"),
        rows=rows,
        run=provenance(0, ("numpy", "scipy", "numba", "torch")),
    )
