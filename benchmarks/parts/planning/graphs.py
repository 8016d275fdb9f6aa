"""Planners on published, random and large graphs: overhead, bound, gap, seconds and the planner's own memory."""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.lib.results import DATA, path_of, provenance, read_results, write_results
from benchmarks.models.step_graphs import FAMILIES
from memfit.capture.node_link import load_node_link
from memfit.core.costs import Costs
from memfit.core.errors import MemfitError
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome, Status
from memfit.planning import Progress, plan
from memfit.planning.search.auto import Portfolio

GRAPHS = DATA / "remat"
FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5)
UNSEEN_SIZES, UNSEEN_FRACTIONS = (100, 200, 353), (0.8, 0.6, 0.5)
QUICK = ("cut_lp", "chain_dp", "greedy", "drop_cheap", "sqrt_segments")
EXACT = ("checkmate", "checkmate_rounding", "monet", "cp_sat")
COLUMNS = ("graph", "ops", "budget", "planner", "status", "overhead_points", "bound_points", "gap_points", "first_s", "seconds", "note")
_NOTE = (
    "Overhead, bound and gap in points (percent of the plain step's time); the budget is a share of the peak of the step in its given "
    "order. `first_s` is when the first plan was there. Kernels were compiled before (cached on disk); other work shared the two cores, "
    "so seconds are upper limits. INFEASIBLE is always with a proof; UNKNOWN is a planner that found nothing. Of published graphs the rows of "
    "baselines may be from an earlier run: each raw row names its commit and command."
)

_UNSEEN_NOTE = (
    " Random layered graphs whose seeds were never used before. `best_known_points` is the better of this run and one from another seed for twice "
    "as long, which does not stop at a small gap; `behind_points` is how far this run is from it. Where both say UNKNOWN nobody knows."
)


def measure(name: str, graph: Graph, costs: Costs, fraction: float, planner: str | Portfolio, seconds: float) -> dict[str, Any]:
    """One row: a planner at one budget."""
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline
    first: list[float] = []

    def listen(progress: Progress) -> None:
        if progress.best_time_ns is not None and not first:
            first.append(progress.seconds)

    limit = int(whole.peak_bytes * fraction)
    try:
        outcome = plan(graph, costs, limit, planner=planner, time_limit_s=seconds, progress=listen)
    except MemfitError as refusal:
        outcome = Outcome(status=Status.UNKNOWN, reason=str(refusal))
    points = lambda time: round(100 * (time / max(whole.time_ns, 1) - 1), 3)  # noqa: E731
    overhead = points(outcome.plan.timeline.time_ns) if outcome.plan else None
    bound = points(outcome.lower_bound_ns) if outcome.lower_bound_ns else None
    return {
        "graph": name,
        "ops": len(graph.ops),
        "budget": f"{fraction:.0%}",
        "planner": planner if isinstance(planner, str) else planner.name,
        "status": str(outcome.status),
        "overhead_points": "" if overhead is None else overhead,
        "bound_points": "" if bound is None or planner in EXACT + QUICK[1:] else bound,
        "gap_points": "" if overhead is None or bound is None or planner in EXACT + QUICK[1:] else round(overhead - bound, 3),
        "first_s": round(first[0], 2) if first else "",
        "seconds": round(outcome.seconds, 2),
        "note": outcome.reason[:60] if outcome.plan is not None else "",
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def auto_again(seconds: float) -> Iterator[dict[str, Any]]:
    """The rows of the last run, with `auto` measured anew and the other planners' as they were, each with its own commit."""
    for row in read_results(path_of("planning_published"))[1]:
        if row["planner"] == "auto":
            graph, costs = load_node_link(GRAPHS / f"{row['graph']}.json")
            yield measure(row["graph"], graph, costs, float(row["budget"].rstrip("%")) / 100, "auto", seconds)
        else:
            yield row


def published(seconds: float, exact_seconds: float) -> Iterator[dict[str, Any]]:
    """The node-link graphs with every planner; the exact ones where they have a chance."""
    for path in sorted(GRAPHS.glob("*.json")):
        graph, costs = load_node_link(path)
        for fraction in FRACTIONS:
            row = measure(path.stem, graph, costs, fraction, "auto", seconds)
            yield row
            if row["status"] == "INFEASIBLE":
                continue
            for planner in QUICK:
                yield measure(path.stem, graph, costs, fraction, planner, seconds)
            for planner in EXACT if len(graph.ops) <= 75 and exact_seconds else ():
                yield measure(path.stem, graph, costs, fraction, planner, exact_seconds)


def layered(seconds: float, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Unseen random layered graphs of 1,000 nodes at 80 %."""
    for seed in seeds:
        graph, costs = FAMILIES["random_layered"](1000, seed)
        yield measure(f"random_layered_1000_seed{seed}", graph, costs, 0.8, "auto", seconds)


def unseen(seconds: float, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Unseen random layered graphs as large as the published ones, each also searched for twice as long from another seed: the best known."""
    for seed, num_nodes in product(seeds, UNSEEN_SIZES):
        graph, costs = FAMILIES["random_layered"](num_nodes, seed)
        for fraction in UNSEEN_FRACTIONS:
            name = f"random_layered_{num_nodes}_seed{seed}"
            row = measure(name, graph, costs, fraction, "auto", seconds)
            other = measure(name, graph, costs, fraction, Portfolio(seed=1000, enough_points=0.0), 2 * seconds)
            known = [r["overhead_points"] for r in (row, other) if r["overhead_points"] != ""]
            behind = row["overhead_points"] - min(known) if row["overhead_points"] != "" else ""
            yield {**row, "best_known_points": min(known, default=""), "behind_points": behind and round(behind, 3)}


def large(seconds: float) -> Iterator[dict[str, Any]]:
    """10,000 ops of every family."""
    for family, make in FAMILIES.items():
        graph, costs = make(10_000, 1)
        for fraction in (0.8, 0.5):
            yield measure(f"{family}_10000", graph, costs, fraction, "auto", 10.0 if family == "transformer" else seconds)


def main(theme: str) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13], help="layered, unseen: of the random graphs")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of auto for each budget")
    parser.add_argument("--exact-seconds", type=float, default=20.0, help="time limit of each exact planner; 0 leaves them out")
    parser.add_argument("--only-auto", action="store_true", help="published: keep the other planners' rows of the last run")
    options = parser.parse_args()
    plan(*FAMILIES["transformer"](200, 0), 20_000, time_limit_s=2.0)  # compiles the kernels
    rows = []
    again = auto_again(options.seconds) if options.only_auto else published(options.seconds, options.exact_seconds)
    source = again if theme == "published" else None
    drawn = {"layered": layered, "unseen": unseen}.get(theme)
    for row in source or (drawn(options.seconds, options.seeds) if drawn else large(options.seconds)):
        print({k: v for k, v in row.items() if k != "note"}, file=sys.stderr, flush=True)
        rows.append(row)
    write_results(
        f"planning_{theme}",
        title=f"Planners: {theme} graphs",
        text=_NOTE + (_UNSEEN_NOTE if theme == "unseen" else ""),
        columns=(*COLUMNS[:-1], *(("best_known_points", "behind_points") if theme == "unseen" else ()), "peak_rss_mib", "note"),
        rows=rows,
        run=provenance(0, ("numpy", "scipy", "numba", "ortools")),
    )
