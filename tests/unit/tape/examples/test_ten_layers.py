"""SOURCES D20: 75 matmuls in the slides, 51 from the nearest checkpoint, 38 when a segment is rebuilt once, fewer when planned."""

from __future__ import annotations

import numpy as np

from memfit import planning, tape
from memfit.chain.strategies.revolve import num_forwards
from memfit.core import simulate
from memfit.tape.examples.ten_layers import count_matmuls, least_matmuls, nearest_checkpoint, run_the_slides, ten_layers
from memfit.tape.memory.byte_trace import trace
from memfit.tape.plain_schedules import drop_early, keep_all


def test_the_slides_count_75_by_a_late_binding_closure_that_rebuilds_wrong_values() -> None:
    assert run_the_slides() == (75, False)
    assert run_the_slides(bind_late=False) == (51, True)


def test_revolve_with_the_same_two_slots_needs_41() -> None:
    """x and one more state: 20 forward steps for ten backward ones, and z9 for the loss."""
    assert num_forwards(10, 2) + 1 + 20 == 41


def test_counts_on_the_tape() -> None:
    case = ten_layers()
    graph = case.program.graph
    assert count_matmuls(graph, keep_all(graph)) == 30
    counts, peaks = {}, {}
    for share in (False, True):
        schedule = nearest_checkpoint(case, share=share)
        seen = trace(case.program, schedule)
        assert seen.predicted_bytes == seen.measured_bytes
        for a, b in zip(seen.results, tape.Executor(case.program, keep_all(graph)).run(), strict=True):
            np.testing.assert_array_equal(a, b)
        counts[share], peaks[share] = count_matmuls(graph, schedule), simulate(graph, schedule, case.matmul_costs).peak_bytes
    assert counts == {False: 51, True: 38}
    everything = simulate(graph, drop_early(graph), case.matmul_costs).peak_bytes
    assert peaks[False] < peaks[True] < everything
    assert (least_matmuls(case, everything), least_matmuls(case, everything - 1)) == (30, 31)
    assert least_matmuls(case, 1000) is None
    for share, optimum in ((False, 38), (True, 33)):
        assert least_matmuls(case, peaks[share]) == optimum
        plan = planning.plan(graph, case.matmul_costs, peaks[share], time_limit_s=2).require_plan()
        assert 30 <= count_matmuls(graph, plan.schedule) <= optimum, "a planner may also change the order of ops"
        seen = trace(case.program, plan.schedule)
        assert seen.predicted_bytes == seen.measured_bytes
