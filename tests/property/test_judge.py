"""The judge agrees with a naive second judge on 10,000 random cases: verdict, step of refusal, bytes, kinds, levels, time."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from tests import strategies as some
from tests.property.naive_judge import NaiveJudge, Refused, Seen

from memfit.core.budget import Budget
from memfit.core.errors import IllegalSchedule
from memfit.core.lifetimes import SCRATCH, lifetimes, max_load
from memfit.core.plan import Timeline
from memfit.core.schedule import Compute, Free, Reload
from memfit.core.simulate import simulate


def _fast(case: some.Case, budget: Budget) -> Timeline | int:
    try:
        return simulate(case.graph, case.schedule, case.costs, budget)
    except IllegalSchedule as refusal:
        return refusal.step


def _naive(case: some.Case, budget: Budget) -> Seen | int:
    try:
        return NaiveJudge(case.graph, case.costs, budget).judge(case.schedule)
    except Refused as refusal:
        return refusal.step


def _as_seen(timeline: Timeline) -> Seen:
    assert timeline.peak_bytes == timeline.level_peak_bytes[0]
    return Seen(
        bytes_at_step=timeline.bytes_at_step,
        by_kind={str(k): row for k, row in zip(timeline.kinds, timeline.bytes_by_kind, strict=True)},
        level_peaks=timeline.level_peak_bytes,
        peak_step=timeline.peak_step,
        time_ns=timeline.time_ns,
        serial_time_ns=timeline.serial_time_ns,
        compute_time_ns=timeline.compute_time_ns,
    )


def _agree(case: some.Case, budget: Budget) -> bool:
    """Fails unless both judges say the same; tells whether the case was legal."""
    fast, naive = _fast(case, budget), _naive(case, budget)
    assert (_as_seen(fast) if isinstance(fast, Timeline) else fast) == naive
    return isinstance(fast, Timeline)


def _any_budget(rng: Random, case: some.Case) -> Budget:
    """None, or limits near what the schedule holds: above, exactly at, and just below."""
    fast = _fast(case, Budget())
    if not isinstance(fast, Timeline) or rng.random() < 0.3:
        return Budget(device_bytes=rng.choice((None, None, 100, 300)), host_bytes=rng.choice((None, 50)))
    limits = [rng.choice((None, peak, max(peak - 1, 0), peak // 2, peak + 1)) for peak in fast.level_peak_bytes]
    limits += [None] * (3 - len(limits))
    return Budget(device_bytes=limits[0], host_bytes=limits[1], disk_bytes=limits[2])


@pytest.mark.parametrize("block", range(10))
def test_both_judges_agree_on_ten_thousand_cases(block: int) -> None:
    legal = 0
    for seed in range(1000 * block, 1000 * (block + 1)):
        rng = Random(seed)
        case = some.random_case(rng) if seed % 2 else some.random_illegal_case(rng)
        budget = _any_budget(rng, case)
        try:
            legal += _agree(case, budget)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, budget {budget}: {error}") from None
    assert 200 < legal < 800, "the cases must be a mix of legal and illegal ones"


@settings(max_examples=150, deadline=None)
@given(some.cases())
def test_both_judges_agree_on_what_hypothesis_draws(case: some.Case) -> None:
    assert _agree(case, Budget())


@settings(max_examples=150, deadline=None)
@given(some.illegal_cases())
def test_both_judges_agree_on_mutated_schedules(case: some.Case) -> None:
    _agree(case, Budget())


@settings(max_examples=150, deadline=None)
@given(some.cases())
def test_the_verdict_flips_exactly_at_the_peak(case: some.Case) -> None:
    timeline = simulate(case.graph, case.schedule, case.costs)
    at_peak = Budget(device_bytes=timeline.peak_bytes)
    assert simulate(case.graph, case.schedule, case.costs, at_peak) == timeline
    if timeline.peak_bytes:
        with pytest.raises(IllegalSchedule, match="more than its budget"):
            simulate(case.graph, case.schedule, case.costs, Budget(device_bytes=timeline.peak_bytes - 1))


@settings(max_examples=150, deadline=None)
@given(some.cases())
def test_overlap_never_hurts_and_never_beats_either_part(case: some.Case) -> None:
    timeline = simulate(case.graph, case.schedule, case.costs)
    assert timeline.compute_time_ns <= timeline.time_ns <= timeline.serial_time_ns


@settings(max_examples=300, deadline=None)
@given(some.cases())
def test_lifetimes_add_up_to_what_the_judge_saw(case: some.Case) -> None:
    """At every step: what the caller holds plus the allocations alive is what the judge counted."""
    timeline = simulate(case.graph, case.schedule, case.costs)
    items = lifetimes(case.graph, case.schedule, case.costs)
    callers = _callers_bytes(case)
    for i, seen in enumerate(timeline.bytes_at_step):
        assert callers[i] + sum(x.size_bytes for x in items if x.start <= i < x.stop) == seen
    assert max_load(items) == max(
        (sum(x.size_bytes for x in items if x.start <= i < x.stop) for i in range(len(case.schedule.steps))), default=0
    )
    assert all(x.size_bytes > 0 for x in items if x.storage == SCRATCH)


def _callers_bytes(case: some.Case) -> list[int]:
    """Bytes of the sources at each step until they are freed; an overwritten source's bytes pass to the new storage."""
    graph = case.graph
    sizes = [s.size_bytes for s in graph.storages]
    owned = {graph.storage_of(t) for t in graph.sources}
    resident = set(owned)
    held = []
    for step in case.schedule.steps:
        if isinstance(step, Free) and step.level == 0:
            owned.discard(step.storage)
            resident.discard(step.storage)
        elif isinstance(step, Reload):
            resident.add(step.storage)
        held.append(sum(sizes[s] for s in owned))
        if isinstance(step, Compute):
            form = graph.ops[step.op].form(step.variant)
            for new, old in ((graph.storage_of(n), graph.storage_of(o)) for n, o in form.inplace_of):
                if old in owned and new not in resident:
                    owned.add(new)
                owned.discard(old)
                resident.discard(old)
            resident |= {graph.storage_of(t) for t in form.outputs}
    return held
