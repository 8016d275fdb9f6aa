"""Offload as a third choice beside keeping and recomputing: what the link to the host can carry while ops run costs next to nothing.

    forward    F1  F2  F3 ... Fn | Bn ... B3  B2  B1     backward
    to host        └ 1 ┘└─ 2 ─┘                          as early as made, freed when the copy is complete
    from host                          └─ 2 ─┘└ 1 ┘      early enough for its first reader, as far as memory allows

1. `choose_offloaded`: values that wait longest, as many as the link offloads before the peak and reloads in time.
2. `graph.py`: the graph with these values offloaded and reloaded, which any planner can plan.
3. `overlap.py`: frees wait until their copies are complete, reloads move ahead of their readers, as memory allows.

The judge, which knows the link, has the last word: the plan is taken only where it is faster than the one without offload by more than
copies slow down what runs beside them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from memfit.core.costs import DEVICE, HOST
from memfit.core.errors import IllegalSchedule
from memfit.core.graph import Graph
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan
from memfit.core.schedule import Compute, Free, Schedule
from memfit.core.simulate import simulate
from memfit.planning.model.lower_bounds import find_floor
from memfit.planning.offload.graph import OffloadGraph, find_waitable
from memfit.planning.offload.overlap import measure_waits, overlap_copies
from memfit.planning.problem import Planner, Problem
from memfit.planning.search.auto import Portfolio

_LEAST_FRACTION = 1 / 1500
"""Of the plain step's peak: smaller values are not worth a copy."""
_SHARE_WITHOUT = 0.3
"""Of the time: for the plan without offload, which says what is kept."""
_ROUNDS = 4
"""In each, what ops of the round before had to wait for is fetched earlier; what they waited for twice is not sent; where nothing was
waited for, more is sent of what that round's plan has room to keep."""
_SLOWDOWN = 0.05
"""Of a copy's time: by how much it slows the ops beside it (on an H200 2 to 6 % over whole steps of ResNet-50 and UNet)."""
_WORTH_WAITING = 0.001
"""Of the plan's time: a storage that is waited for longer is better not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """`planner` with offload beside it; `without` is its answer where that is known already."""

    planner: Planner = field(default_factory=Portfolio)
    without: Outcome | None = field(default=None, repr=False)
    name: str = "offload"

    def plan(self, problem: Problem) -> Outcome:
        without = self.without or self.planner.plan(replace(problem, time_limit_s=_SHARE_WITHOUT * problem.time_limit_s))
        if not problem.costs.levels or problem.budget.device_bytes is None or _repeats_nothing(problem, without):
            return without
        return _drop_borrowed_proof(problem, _plan_with_offload(problem, without, self.planner))


def _repeats_nothing(problem: Problem, outcome: Outcome) -> bool:
    return outcome.plan is not None and outcome.plan.timeline.time_ns <= find_floor(problem.model).time_ns


def _drop_borrowed_proof(problem: Problem, outcome: Outcome) -> Outcome:
    """A proof by cuts is one for plans without offload; that some op needs more than there is holds for all."""
    floor = find_floor(problem.model)
    if outcome.status is not Status.INFEASIBLE or problem.limit_bytes < floor.bytes:
        return outcome
    reason = f"With offload nothing was found and nothing is ruled out; without it: {outcome.reason}"
    return replace(outcome, status=Status.UNKNOWN, lower_bound_ns=floor.time_ns, lower_bound_bytes=floor.bytes, reason=reason)


def _plan_with_offload(problem: Problem, without: Outcome, planner: Planner) -> Outcome:
    """`without`, or a faster outcome that sends values to the host: also where there is no plan without."""
    best, uses = without, _Uses.of(problem)
    needs = choose_offloaded(problem, uses, without.plan, {})
    corrected: set[int] = set()
    for round_ in range(_ROUNDS):
        seconds = problem.seconds_left / (_ROUNDS - round_)
        found = _plan_copies(problem, uses, needs, planner, seconds) if needs and seconds > 0 else None
        if found is None:
            break
        if best.plan is None or _felt_ns(found) < _felt_ns(best.plan):
            best = _make_outcome(problem, found, without)
        waited_ns = measure_waits(problem, found.schedule)
        late = {s for s, ns in waited_ns.items() if ns > _WORTH_WAITING * found.timeline.time_ns}
        if not late:
            before, needs = needs, choose_offloaded(problem, uses, found, needs)
            if needs == before:
                break
            continue
        read = uses.first_reads(problem.graph, found.schedule, late - corrected)
        needs = {s: min(p, read.get(s, p)) for s, p in needs.items() if s not in late & corrected}
        hidden = _find_hiding_ops(problem, uses, needs)
        needs = {s: p for s, p in needs.items() if s in hidden}
        corrected |= late
    return replace(best, seconds=problem.seconds)


def _felt_ns(plan: Plan) -> float:
    """The plan's time, and what its copies take from the ops beside them."""
    timeline = plan.timeline
    return timeline.time_ns + _SLOWDOWN * (timeline.serial_time_ns - timeline.compute_time_ns)


def _make_outcome(problem: Problem, plan: Plan, without: Outcome) -> Outcome:
    """The bound is that of all plans, with any offload: every op once."""
    bound_ns = find_floor(problem.model).time_ns
    gap = (plan.timeline.time_ns - bound_ns) / bound_ns if bound_ns else None
    return Outcome(status=Status.FEASIBLE, plan=plan, lower_bound_ns=bound_ns, lower_bound_bytes=0, gap_fraction=gap, reason=without.reason)


# -- what to send ----------------------------------------------------------------------------------------------------


def choose_offloaded(problem: Problem, uses: _Uses, plan: Plan | None, already: dict[int, int]) -> dict[int, int]:
    """Storages made before the step's peak and read after it, which `plan` (if there is one) keeps: those read last first, as many as the
    link can send off before the peak and bring back in time. For each, by position in the plain step, by when it is read again; those
    sent `already` come first."""
    graph = problem.graph
    least_bytes = max(1, int(_LEAST_FRACTION * uses.peak_bytes))
    needs = {s: uses.first_read_after_peak(s) for s in uses.made if uses.waits(s)}
    if plan is not None:
        needs = uses.first_reads(graph, plan.schedule, uses.kept(graph, plan.schedule) & needs.keys())
    found = dict(already)
    for storage, need in sorted(needs.items(), key=lambda entry: (entry[1], entry[0]), reverse=True):
        if storage in found:
            continue
        more = {**found, storage: need}
        large = graph.storages[storage].size_bytes >= least_bytes
        if large and _can_offload_in_time(problem, uses, more) and storage in _find_hiding_ops(problem, uses, more):
            found = more
    return found


def _can_offload_in_time(problem: Problem, uses: _Uses, storages: Iterable[int]) -> bool:
    """Whether the link can send these off before the peak, one after the other as they are made."""
    link, free_ns = problem.costs.levels[HOST - 1], 0
    for storage in sorted(storages, key=uses.made.__getitem__):
        free_ns = max(free_ns, uses.clock_ns[uses.made[storage]]) + link.write_ns(problem.graph.storages[storage].size_bytes)
    return free_ns <= uses.clock_ns[uses.turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """The plain step: when each storage that one op makes whole is made and read, by position; the position of the peak; ends of ops."""

    made: dict[int, int]
    reads: dict[int, list[int]]
    ops: list[int]
    clock_ns: list[int]
    turn: int
    peak_bytes: int

    @classmethod
    def of(cls, problem: Problem) -> _Uses:
        graph, costs, model = problem.graph, problem.costs, problem.model
        order = [model.forms[f] for f in model.agenda]
        made: dict[int, int] = {}
        reads: dict[int, list[int]] = {}
        for position, (op, variant) in enumerate(order):
            form = graph.ops[op].form(variant)
            for tensor in form.inputs:
                reads.setdefault(graph.storage_of(tensor), []).append(position)
            for tensor in form.outputs:
                made.setdefault(graph.storage_of(tensor), position)
        outside = {graph.storage_of(t) for t in (*graph.sources, *graph.results)}
        able = find_waitable(graph)
        plain = {s: p for s, p in made.items() if s in able}
        clock = list(accumulate(costs.time_ns(*form) for form in order))
        turn, peak_bytes = _find_peak(graph, order, made, reads, outside)
        return cls(made=plain, reads=reads, ops=[op for op, _ in order], clock_ns=clock, turn=turn, peak_bytes=peak_bytes)

    def first_read_after_peak(self, storage: int) -> int:
        return min(p for p in self.reads[storage] if p > self.turn)

    def readers_after_peak(self, storage: int) -> list[int]:
        return [self.ops[p] for p in self.reads[storage] if p > self.turn]

    def first_reads(self, graph: Graph, schedule: Schedule, storages: set[int]) -> dict[int, int]:
        """By which op of the plain step, by position, each storage is first read after the peak, be it to make something again."""
        position = {op: p for p, op in enumerate(self.ops) if p > self.turn}
        found: dict[int, int] = {}
        pending: set[int] = set()
        begun = False
        for step in schedule.computes:
            begun |= step.op in position
            pending |= (
                {graph.storage_of(t) for t in graph.ops[step.op].form(step.variant).inputs} & storages - found.keys() if begun else set()
            )
            if step.op in position:
                found |= dict.fromkeys(pending, position[step.op])
                pending.clear()
        return found

    def kept(self, graph: Graph, schedule: Schedule) -> set[int]:
        """Storages that a schedule holds when the first op after the peak runs."""
        later = set(self.ops[self.turn + 1 :])
        there: set[int] = set()
        for step in schedule.steps:
            if isinstance(step, Compute):
                if step.op in later:
                    break
                form = graph.ops[step.op].form(step.variant)
                there |= {graph.storage_of(t) for t in form.outputs}
                there -= {graph.storage_of(old) for _, old in form.inplace_of}
            elif isinstance(step, Free) and step.level == DEVICE:
                there.discard(step.storage)
        return there

    def waits(self, storage: int) -> bool:
        """Whether it is there at the peak only for readers that come later."""
        reads = self.reads.get(storage, [])
        return self.made[storage] < self.turn and any(p > self.turn for p in reads) and self.turn not in reads


def _find_peak(
    graph: Graph, order: Sequence[tuple[int, int]], made: dict[int, int], reads: dict[int, list[int]], outside: set[int]
) -> tuple[int, int]:
    """Where the plain step holds most of what is made before and read later, and how much that is."""
    change = [0] * (len(order) + 1)
    for storage, start in made.items():
        if storage not in outside:
            size = graph.storages[storage].size_bytes
            change[start] += size
            change[max([start, *reads.get(storage, [])]) + 1] -= size
    held = list(accumulate(change[:-1]))
    peak = max(held, default=0)
    return (held.index(peak) if held else 0), peak


# -- planning with it ------------------------------------------------------------------------------------------------


def _plan_copies(problem: Problem, uses: _Uses, needs: dict[int, int], planner: Planner, seconds: float) -> Plan | None:
    ahead: dict[int, list[int]] = {}
    for storage, op in _find_hiding_ops(problem, uses, needs).items():
        ahead.setdefault(op, []).append(storage)
    offloading = OffloadGraph(problem.graph, problem.costs, {s: uses.readers_after_peak(s) for s in needs}, ahead)
    inner = Problem(graph=offloading.graph, costs=offloading.costs, budget=problem.budget, time_limit_s=seconds, progress=problem.progress)
    found = planner.plan(inner).plan
    if found is None:
        return None
    try:
        schedule = overlap_copies(problem, offloading.translate(found.schedule))
        timeline = simulate(problem.graph, schedule, problem.costs, problem.budget)
    except IllegalSchedule:
        return None
    return Plan(
        schedule=schedule,
        timeline=timeline,
        planner="offload",
        graph_digest=problem.graph.digest,
        budget=problem.budget,
    )


def _find_hiding_ops(problem: Problem, uses: _Uses, needs: dict[int, int]) -> dict[int, int]:
    """For each storage the op of the plain step before which its fetch must begin, one fetch after the other, to be complete in time."""
    link = problem.costs.levels[HOST - 1]
    found: dict[int, int] = {}
    next_ns = float("inf")
    for storage, need in sorted(needs.items(), key=lambda entry: entry[1], reverse=True):
        start_ns = min(next_ns, uses.clock_ns[need - 1]) - link.read_ns(problem.graph.storages[storage].size_bytes)
        ahead = min(bisect_right(uses.clock_ns, start_ns), need - 1)  # the last op that begins no later
        if ahead > uses.turn:
            found[storage] = uses.ops[ahead]
        next_ns = start_ns
    return found
