"""`planner="auto"`: a table of stages. Cuts first, an answer within a second or two, then improvement until the gap is small or time is up.

keep all ─ fits ─> done
    └─ first ─┬─ another order holds less ─> irregular: order and recomputation together, the bound last
              └─ no other order helps ─────> regular: cuts, then everything that can come of them
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.outcome import Outcome, Status
from memfit.planning.annealing.runs import Annealing
from memfit.planning.baselines.chain_dp import ChainDp
from memfit.planning.baselines.drop_cheap import DropCheap
from memfit.planning.baselines.greedy import Greedy
from memfit.planning.baselines.sqrt_segments import SqrtSegments
from memfit.planning.cuts.infeasibility import ProveInfeasible
from memfit.planning.cuts.milestones import Milestones
from memfit.planning.cuts.planner import FirstCut, judge_search
from memfit.planning.cuts.refine import ExactCuts, LongerChains
from memfit.planning.cuts.wide_ops import WideOps
from memfit.planning.cuts.window_milp import Windows
from memfit.planning.jit.warm_up import prepare_kernels
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Planner, Problem
from memfit.planning.search.improve import HurriedWalks, Walks, WalksOn
from memfit.planning.search.reorder import Reorder
from memfit.planning.search.seeds import Segments, SimplePlanners
from memfit.planning.search.stage import Part, Slot
from memfit.planning.search.state import Search
from memfit.planning.search.without_variants import WithoutVariants
from memfit.planning.settings import AutoSettings

AUTO: dict[str, tuple[Slot, ...]] = {
    "first": (Slot(Reorder(first=True), share=0.03, least_s=0.1),),
    "irregular": (
        Slot(FirstCut(), share=0.05),
        Slot(ProveInfeasible(), share=0.03),
        Slot(Annealing(), share=0.9),
        Slot(WalksOn(), share=0.9, of=Part.UNTIL),
        Slot(ExactCuts(), share=0.3, of=Part.LEFT),
        Slot(LongerChains(), share=1.0, of=Part.LEFT),
    ),
    "regular": (
        Slot(FirstCut(), share=0.1, least_s=2.0),
        Slot(FirstCut(large=True), share=0.5, least_s=2.0),
        Slot(WideOps(), share=0.15),
        Slot(WithoutVariants(), of=Part.LEFT),
        Slot(Reorder(), share=0.03, least_s=0.1),
        Slot(Milestones(), share=0.05, first_share=0.1, least_s=1.0),
        Slot(SimplePlanners(), of=Part.LEFT),
        Slot(ProveInfeasible(), share=0.03),
        Slot(Annealing(first_plan=True), share=0.1),
        Slot(HurriedWalks(), share=0.12),
        Slot(ExactCuts(), share=0.2),
        Slot(Segments(), of=Part.LEFT),
        Slot(Walks(), share=0.2),
        Slot(Windows(), share=0.12),
        Slot(LongerChains(began_without_variants=True), share=0.15),
        Slot(LongerChains(), share=0.35),
        Slot(Walks(add_to_seed=100), of=Part.LEFT),
    ),
}
"""The order of stages and their shares of the time. A stage runs where its `applies` says that it is worth it."""
STAGES = tuple(dict.fromkeys(slot.stage.name for line in AUTO.values() for slot in line))
"""The names by which stages are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """`enough_points`: the gap to the proven bound, in points of the plain step's time, at which the search stops.

    `patience`: the share of the time spent without a worthwhile gain at which it stops too; None searches on.
    `reorder` and `max_runs` (how often one op may run) take abilities away, and `without` leaves stages out (`STAGES` has their names), to
    see what they are worth; the bound stays that of all plans.
    """

    name: str = "auto"
    enough_points: float = 0.3
    seed: int = 0
    patience: float | None = None
    reorder: bool = True
    max_runs: int | None = None
    without: tuple[str, ...] = ()
    settings: AutoSettings = field(default_factory=AutoSettings)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.without) - set(STAGES))
        if unknown:
            raise BadInput(f"no stage of auto is called {unknown[0]!r}: known are {', '.join(STAGES)}.")

    def plan(self, problem: Problem) -> Outcome:
        whole = judge_sequence(problem, planner=self.name, sequence=problem.model.agenda)
        if whole.status is Status.OPTIMAL:  # room for everything: no kernel is compiled for that
            problem.tell(whole.require_plan().timeline.time_ns, whole.lower_bound_ns, "keep all")
            return whole
        search = self._begin(prepare_kernels(problem))
        try:
            search.consider(np.array(problem.model.agenda, np.int64), "keep all")
            self._run("first", search)
            small = problem.model.num_forms < self.settings.reorder.huge_forms
            irregular = search.rank is not None and small and self.max_runs is None
            self._run("irregular" if irregular else "regular", search)
        except KeyboardInterrupt:
            problem.tell(search.best_time_ns if search.best is not None else None, search.bound_ns, "stopped: the best plan so far is kept")
        outcome = judge_search(search, self.name)
        return _plan_simply(problem, outcome) if outcome.status is Status.UNKNOWN and self.max_runs is None else outcome

    def _begin(self, problem: Problem) -> Search:
        return Search(
            problem,
            self.settings,
            enough_points=self.enough_points,
            seed=self.seed,
            patience=self.patience,
            max_runs=self.max_runs,
            may_reorder=self.reorder,
            planner=replace(self, patience=None),
        )

    def _run(self, line: str, search: Search) -> None:
        for slot in AUTO[line]:
            if slot.stage.name not in self.without and slot.stage.applies(search):
                slot.stage.run(search, slot.seconds(search))


def _plan_simply(problem: Problem, outcome: Outcome) -> Outcome:
    """Where the search found nothing and proved nothing, a plan by one of the simple planners, if one has it, under the search's bound."""
    simple: tuple[Planner, ...] = (Greedy(), DropCheap(), ChainDp(), SqrtSegments())
    for planner in simple:
        found = planner.plan(problem)
        if found.plan is not None:
            bound = max(outcome.lower_bound_ns, found.lower_bound_ns)
            gap = (found.plan.timeline.time_ns - bound) / bound if bound else None
            floor = max(outcome.lower_bound_bytes, found.lower_bound_bytes)
            return replace(found, lower_bound_ns=bound, lower_bound_bytes=floor, gap_fraction=gap, seconds=problem.seconds)
    return outcome
