"""What each stage of `planner="auto"` is worth: the plan with all of them, and by how much it is slower with one left out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.lib.results import path_of, provenance, read_results, write_results
from benchmarks.models.step_graphs import FAMILIES
from benchmarks.parts.planning.ablation import captured, cell
from benchmarks.parts.planning.graphs import GRAPHS
from memfit.capture.node_link import load_node_link
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome
from memfit.planning import plan
from memfit.planning.search import auto
from memfit.planning.search.auto import AUTO, STAGES, Portfolio
from memfit.planning.search.stage import Stage
from memfit.planning.search.state import Search

COLUMNS = ("step", "budget", "seconds", "all", *(f"- {name}" for name in STAGES))
TEXT = """\
*all* is `planner="auto"`: percent of op time over the plain step. The other columns leave out one stage of its table: by how many points the plan is
then slower (negative: faster). A dot: the stage did not run there, so nothing changes. *lost*: no plan was found without it; *proof lost*: what was
proven with it is not. Captured models have roofline H200 costs, budgets are shares of the keep-all peak above what the caller holds (graphs: of the
keep-all peak); `+ variants` plans over the forms of the same step that give the same bits. Where the first difference is 0.1 points or more, both
searches ran again with other seeds, and the cell is the mean. Rows of steps that are not measured again are kept: each raw row names its commit."""
PUBLISHED = tuple(sorted(path.stem for path in GRAPHS.glob("*.json")))
MODELS = ("resnet50", "unet", "mobilenet_v2", "gpt2", "resnet50 + variants", "unet + variants")
GENERATED = ("random_layered 100 7", "random_layered 150 8", "random_layered 4000 9", "nas_cells 500 7", "dense_net 400 7")
LARGE = ("transformer 10000 1", "nas_cells 10000 1")
SHARES = {"published": (0.8, 0.6, 0.5), "models": (0.6, 0.4, 0.25), "generated": (0.7, 0.5), "large": (0.5,)}
LEAST_LOSS = 0.1
"""Points from which on a difference is measured again with another seed."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A stage that notes that it ran."""

    stage: Stage
    ran: list[str]

    @property
    def name(self) -> str:
        return self.stage.name

    def applies(self, search: Search) -> bool:
        return self.stage.applies(search)

    def run(self, search: Search, seconds: float) -> None:
        self.ran.append(self.name)
        self.stage.run(search, seconds)


def steps(kinds: list[str]) -> Iterator[tuple[str, str, Graph, Costs]]:
    """(kind, name, graph, costs) of all steps of these kinds."""
    for kind in kinds:
        for name in {"published": PUBLISHED, "models": MODELS, "generated": GENERATED, "large": LARGE}[kind]:
            if kind == "published":
                yield kind, name, *load_node_link(GRAPHS / f"{name}.json")
            elif kind == "models":
                plain, costs, others = captured(name.split()[0])
                with_variants, their_costs = next(iter(others["with variants, same bits"]), (None, costs))
                yield (
                    (kind, name, plain, costs)
                    if " " not in name or with_variants is None
                    else (kind, name, with_variants.graph, their_costs)
                )
            else:
                family, num_ops, seed = name.split()
                yield kind, name, *FAMILIES[family](int(num_ops), int(seed))


def points(outcome: Outcome, base_ns: int) -> float:
    return 100 * (outcome.require_plan().timeline.time_ns / base_ns - 1)


def compare(
    graph: Graph, costs: Costs, limit: int, seconds: float, seeds: int, base_ns: int, stages: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(column, cell) of one step at one budget, for each of these stages."""
    ran: list[str] = []
    whole: list[Outcome] = []

    def find(seed: int, without: tuple[str, ...]) -> Outcome:
        return plan(graph, costs, limit, planner=Portfolio(seed=seed, without=without), time_limit_s=seconds)

    def find_whole(seed: int) -> Outcome:
        if len(whole) <= seed:
            auto.AUTO = {line: tuple(replace(slot, stage=Noted(slot.stage, ran)) for slot in slots) for line, slots in AUTO.items()}
            whole.append(find(seed, ()))
            auto.AUTO = AUTO
        return whole[seed]

    yield "all", cell(find_whole(0), base_ns)
    for name in stages:
        if name not in ran:
            yield f"- {name}", "·"
            continue
        losses: list[float] = []
        for seed in range(seeds):
            with_it, without = find_whole(seed), find(seed, (name,))
            if with_it.plan is None or without.plan is None:
                break
            losses.append(points(without, base_ns) - points(with_it, base_ns))
            if abs(losses[0]) < LEAST_LOSS:
                break
        if losses:
            yield f"- {name}", f"{sum(losses) / len(losses):.2f}"
        elif with_it.plan is not None:
            yield f"- {name}", "lost"
        else:
            yield f"- {name}", "found" if without.plan is not None else "0" if with_it.status is without.status else "proof lost"


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """With those of stages that were deleted for what earlier rows say."""
    gone = {name: None for row in rows for name in row if name.startswith("- ") and name not in COLUMNS}
    return (*COLUMNS, *gone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(SHARES)}; all without")
    parser.add_argument("--seconds", type=float, default=4.0, help="time limit for each plan")
    parser.add_argument("--seeds", type=int, default=3, help="searches for a cell in which something changes")
    parser.add_argument(
        "--stages", nargs="*", choices=STAGES, default=STAGES, help="only these: a row of its own, with the other columns empty"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for kind, name, graph, costs in steps(options.kinds or list(SHARES)):
        whole = plan(graph, costs, planner="keep_all").require_plan().timeline
        held = sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in graph.sources}) if kind == "models" else 0
        for share in SHARES[kind]:
            limit = int(held + share * (whole.peak_bytes - held))
            row = {"step": name, "budget": f"{share:.0%}", "seconds": f"{options.seconds:g}"}
            row |= dict(compare(graph, costs, limit, options.seconds, options.seeds, whole.time_ns, options.stages))
            print(" | ".join(str(row[c]) for c in COLUMNS if c in row), file=sys.stderr, flush=True)
            rows.append(row)
    _, before = read_results(path_of("planning_stages"))
    measured = {(row["step"], row["seconds"], tuple(row)) for row in rows}
    rows = [*(row for row in before if (row["step"], row["seconds"], tuple(c for c in row if c in COLUMNS)) not in measured), *rows]
    run = provenance(0, ("torch", "numpy", "scipy", "numba"))
    write_results(
        "planning_stages", title="Stages of the planner, one left out at a time", text=TEXT, columns=columns_of(rows), rows=rows, run=run
    )
