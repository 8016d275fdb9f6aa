"""Every plan passes here on its way out: the sequence becomes a schedule, and the independent judge replays it."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.core.errors import IllegalSchedule
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Plan
from memfit.core.simulate import simulate
from memfit.core.units import format_bytes
from memfit.planning.model.lower_bounds import Floor, find_floor
from memfit.planning.model.to_schedule import schedule_of
from memfit.planning.problem import Problem

_EQUAL = 1e-9
"""Relative gap below which a plan is called optimal: times are whole nanoseconds, bounds come from a float solver."""


def judge_sequence(
    problem: Problem,
    *,
    planner: str,
    sequence: Iterable[int] | None,
    floor: Floor | None = None,
    lower_bound_ns: int = 0,
    lower_bound_bytes: int = 0,
    proof: str = "",
    reason: str = "",
) -> Outcome:
    """The outcome for a sequence (or for none). `proof` is the sentence that rules out every plan, if there is one."""
    floor = floor or find_floor(problem.model)
    bound_ns, bound_bytes = max(lower_bound_ns, floor.time_ns), max(lower_bound_bytes, floor.bytes)
    if not proof and problem.limit_bytes < floor.bytes:
        proof = floor.sentence(problem.limit_bytes)
    if proof:
        return Outcome(
            status=Status.INFEASIBLE, lower_bound_ns=bound_ns, lower_bound_bytes=bound_bytes, seconds=problem.seconds, reason=proof
        )
    if sequence is None:
        return _make_unknown(
            problem, bound_ns, bound_bytes, reason or f"{planner} found no plan inside {format_bytes(problem.limit_bytes)}."
        )
    schedule = schedule_of(problem.model, sequence)
    try:
        timeline = simulate(problem.graph, schedule, problem.costs, problem.budget)
    except IllegalSchedule as refusal:
        return _make_unknown(problem, bound_ns, bound_bytes, f"{planner}: {refusal.cause}.")
    gap = (timeline.time_ns - bound_ns) / bound_ns if bound_ns > 0 else 0.0 if timeline.time_ns == 0 else None
    optimal = gap is not None and gap <= _EQUAL
    return Outcome(
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        plan=Plan(schedule=schedule, timeline=timeline, planner=planner, graph_digest=problem.graph.digest, budget=problem.budget),
        lower_bound_ns=min(bound_ns, timeline.time_ns),
        lower_bound_bytes=min(bound_bytes, timeline.peak_bytes),
        gap_fraction=None if gap is None else max(gap, 0.0),
        seconds=problem.seconds,
        reason=reason,
    )


def _make_unknown(problem: Problem, bound_ns: int, bound_bytes: int, reason: str) -> Outcome:
    return Outcome(status=Status.UNKNOWN, lower_bound_ns=bound_ns, lower_bound_bytes=bound_bytes, seconds=problem.seconds, reason=reason)
