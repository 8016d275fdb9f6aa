"""What the planner's abilities are worth: variants off, every op recomputed at most once, no other order; overhead at equal budgets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.lib.results import provenance, write_results
from benchmarks.models.peers import PEERS
from benchmarks.parts.planning.graphs import GRAPHS
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.capture.node_link import load_node_link
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task
from memfit.planning import plan
from memfit.planning.search.auto import Portfolio
from memfit.profile.roofline import roofline

MODEL_SHARES = (0.6, 0.4, 0.25)
GRAPH_SHARES = (0.8, 0.6, 0.5)
PLANNERS = {
    "all": Portfolio(),
    "recomputed once": Portfolio(max_runs=2),
    "no reordering": Portfolio(reorder=False),
    "neither": Portfolio(max_runs=2, reorder=False),
}
COLUMNS = ("step", "budget", "bound", *PLANNERS, "with variants, same bits", "with all variants", "seconds")
TEXT = """\
Percent of op time over the plain step, at budgets that are shares of the keep-all peak above what the caller holds (graphs: of the keep-all peak).
*all* is `planner="auto"` without operator variants; *recomputed once* rejects every plan in which an op runs more than twice; *no reordering* leaves out
the search over other orders of the step; *neither* is both. The two columns with variants plan over more forms of the same step: those that give the
same bits, then also those that round otherwise (chunked loss, sliced convolutions), the best of all being taken. A dash: no plan was found; *proven*:
there is none. Roofline H200 costs; every search has the same time, and ends early when its gap is small."""


def cell(outcome: Outcome, base_ns: int) -> str:
    if outcome.plan is not None:
        return f"{100 * (outcome.plan.timeline.time_ns / base_ns - 1):.2f}"
    return "proven" if str(outcome.status).endswith("INFEASIBLE") else "–"


def rows_of(
    name: str, graph: Graph, costs: Costs, others: dict[str, list[tuple[Captured, Costs]]], seconds: float
) -> Iterator[dict[str, Any]]:
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline
    held = sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in graph.sources}) if others else 0
    for share in MODEL_SHARES if others else GRAPH_SHARES:
        limit = int(held + share * (whole.peak_bytes - held))
        found = {label: plan(graph, costs, limit, planner=planner, time_limit_s=seconds) for label, planner in PLANNERS.items()}
        row = {"step": name, "budget": f"{share:.0%}", **{k: cell(o, whole.time_ns) for k, o in found.items()}}
        row["bound"] = f"{100 * (max(o.lower_bound_ns for o in found.values()) / whole.time_ns - 1):.2f}"
        outcomes = [found["all"]]
        for label in ("with variants, same bits", "with all variants"):
            outcomes += [plan(c.graph, k, limit, time_limit_s=seconds) for c, k in others.get(label, [])]
            best = min(outcomes, key=lambda o: o.plan.timeline.time_ns if o.plan else 2**62)
            row[label] = cell(best, whole.time_ns) if others else ""
        yield {**row, "seconds": f"{sum(o.seconds for o in [*found.values(), *outcomes[1:]]):.0f}"}


def captured(name: str) -> tuple[Graph, Costs, dict[str, list[tuple[Captured, Costs]]]]:
    """The plain step, and its forms with variants as `fit` offers them."""
    peer = PEERS[name]
    model, inputs = peer.build().train(), peer.inputs("cpu", 1.0)
    targets = peer.targets("cpu", 1.0) or inputs
    task = Task(model=model, loss_fn=peer.loss, num_targets=len(targets))
    with torch.autocast("cpu", torch.bfloat16, enabled=peer.autocast):
        offers = [(f.captured, roofline(f.captured, "h200")) for f in Forms(task, Call.flatten((*inputs, *targets), {})).usual()]
    (plain, costs), same, rest = offers[0], offers[1:2], offers[2:]
    return plain.graph, costs, {"with variants, same bits": same, "with all variants": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(PEERS)}, or names of graph files; all without")
    parser.add_argument("--seconds", type=float, default=6.0, help="time limit for each plan")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.steps or [*PEERS, *(p.stem for p in sorted(GRAPHS.glob("*.json")))]
    rows = []
    for name in names:
        graph, costs, others = captured(name) if name in PEERS else (*load_node_link(GRAPHS / f"{name}.json"), {})
        for row in rows_of(name, graph, costs, others, options.seconds):
            print(" | ".join(str(row[c]) for c in COLUMNS), file=sys.stderr, flush=True)
            rows.append(row)
    run = provenance(0, ("torch", "numpy", "scipy", "numba"))
    write_results("planning_ablation", title="Ablation of the planner", text=TEXT, columns=COLUMNS, rows=rows, run=run)
