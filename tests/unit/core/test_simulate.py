"""The judge, rule by rule, on graphs whose numbers can be checked in the head."""

from __future__ import annotations

import pytest
from tests.small import chain, graph_of, op

from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level, uniform_costs
from memfit.core.errors import BadInput, IllegalSchedule
from memfit.core.graph import Graph, Kind, Variant
from memfit.core.plan import Timeline
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step
from memfit.core.simulate import simulate


def judge(graph: Graph, *steps: Step, costs: Costs | None = None, budget: Budget | None = None) -> Timeline:
    return simulate(graph, Schedule(steps=steps), costs, budget)


def refusal(graph: Graph, *steps: Step, costs: Costs | None = None, budget: Budget | None = None) -> IllegalSchedule:
    with pytest.raises(IllegalSchedule) as caught:
        judge(graph, *steps, costs=costs, budget=budget)
    return caught.value


def with_levels(graph: Graph, *levels: Level, time_ns: int = 100) -> Costs:
    base = uniform_costs(graph, time_ns=time_ns)
    return Costs(
        op_time_ns=base.op_time_ns,
        workspace_bytes=base.workspace_bytes,
        variant_time_ns=base.variant_time_ns,
        variant_workspace_bytes=base.variant_workspace_bytes,
        levels=levels,
    )


SLOW = Level(write_latency_ns=250, read_latency_ns=300)


# -- bytes ---------------------------------------------------------------------------------------------------------


def test_a_chain_holds_an_input_and_an_output() -> None:
    timeline = judge(chain(3), Compute(0), Free(0), Compute(1), Free(1), Compute(2))
    assert timeline.bytes_at_step == (20, 10, 20, 10, 20)
    assert (timeline.peak_bytes, timeline.peak_step, timeline.time_ns) == (20, 0, 3)


def test_bytes_by_kind_and_workspace_as_temporary() -> None:
    costs = Costs(op_time_ns=(1,), workspace_bytes=(7,))
    timeline = judge(chain(1), Compute(0), Free(0), costs=costs)
    rows = dict(zip(timeline.kinds, timeline.bytes_by_kind, strict=True))
    assert rows[Kind.INPUT] == (10, 0)
    assert rows[Kind.ACTIVATION] == (10, 10)
    assert rows[Kind.TEMPORARY] == (7, 0)
    assert timeline.bytes_at_step == (27, 10)


def test_an_empty_schedule_holds_the_sources() -> None:
    timeline = judge(graph_of([5], [], results=[0]))
    assert (timeline.peak_bytes, timeline.peak_step, timeline.bytes_at_step) == (5, -1, ())
    assert timeline.bytes_by_kind == ((),) * len(timeline.kinds)


def test_two_sources_in_one_storage_count_once() -> None:
    assert judge(graph_of([5], [], sources=[0, 1], views=[0])).peak_bytes == 5


def test_a_value_nobody_reads_stays_until_freed() -> None:
    assert judge(graph_of([1, 2, 4], [op(0, [0], [1]), op(1, [0], [2])], results=[2]), Compute(0), Compute(1)).peak_bytes == 7


def test_running_again_while_the_output_is_there_needs_a_second_copy() -> None:
    timeline = judge(chain(1), Compute(0), Compute(0), Free(0))
    assert timeline.bytes_at_step == (20, 30, 10)
    assert timeline.bytes_by_kind[timeline.kinds.index(Kind.TEMPORARY)] == (0, 10, 0)


def test_zero_sizes_cost_nothing_but_must_still_be_there() -> None:
    assert judge(chain(2, 0), Compute(0), Compute(1)).peak_bytes == 0
    assert refusal(chain(2, 0), Compute(1)).step == 0


# -- what is refused -----------------------------------------------------------------------------------------------


def test_reads_a_freed_tensor() -> None:
    error = refusal(chain(2), Compute(0), Free(1), Compute(1))
    assert error.step == 2
    assert "op 1 (f1) reads tensor 1 of storage 1, which was freed at step 1" in error.cause


def test_reads_what_was_never_computed() -> None:
    assert "was never computed" in refusal(chain(2), Compute(1)).cause


def test_frees_twice() -> None:
    error = refusal(chain(1), Compute(0), Free(0), Free(0))
    assert (error.step, error.cause) == (2, "frees storage 0, which was freed at step 1")


def test_never_produces_a_result() -> None:
    error = refusal(chain(2), Compute(0))
    assert error.step == -1
    assert "never produces result tensor 2" in error.cause


def test_loses_a_result() -> None:
    assert "freed at step 2" in refusal(chain(2), Compute(0), Compute(1), Free(2)).cause


@pytest.mark.parametrize("step", [Compute(-1), Compute(9), Compute(0, 1), Compute(0, -1), Free(9), Free(-1), Free(0, 1), Free(0, -1)])
def test_names_what_is_not_there(step: Step) -> None:
    assert refusal(chain(1), step).step == 0


@pytest.mark.parametrize("step", [Offload(0, 0), Offload(0, 2), Offload(9, 1), Reload(0, 0), Reload(0, 2), Reload(-1, 1)])
def test_names_a_level_or_storage_that_is_not_there(step: Step) -> None:
    assert refusal(chain(1), step, costs=with_levels(chain(1), Level())).step == 0


def test_something_that_is_not_a_step() -> None:
    assert "is not a step" in refusal(chain(1), Compute(0), "banana").cause  # type: ignore[arg-type]


def test_replays_what_runs_once() -> None:
    graph = graph_of([1, 1], [op(0, [0], [1], replayable=False)], results=[1])
    assert "ran before and cannot be replayed" in refusal(graph, Compute(0), Free(1), Compute(0)).cause


def test_random_draws_keep_their_order_and_may_be_replayed() -> None:
    graph = graph_of([1] * 4, [op(i, [0], [i + 1], seeded=True) for i in range(3)], results=[1, 2, 3])
    judge(graph, Compute(0), Free(1), Compute(1), Compute(0), Compute(2))
    error = refusal(graph, Compute(0), Compute(2), Compute(1))
    assert error.step == 2
    assert "random numbers" in error.cause


def test_the_cause_names_the_module() -> None:
    graph = graph_of([1, 1], [op(0, [0], [1], where="layers.3.mlp")], results=[1])
    assert "op 0 (f0, layers.3.mlp)" in refusal(graph, Free(0), Compute(0)).cause


def test_costs_of_another_graph() -> None:
    with pytest.raises(BadInput, match="belong to graph"):
        judge(chain(2), costs=uniform_costs(chain(3)))


# -- budgets -------------------------------------------------------------------------------------------------------


def test_exceeds_the_device() -> None:
    error = refusal(chain(2), Compute(0), Compute(1), budget=Budget(device_bytes=29))
    assert error.step == 1
    assert error.cause == "with op 1 (f1) the device holds 30 B (30 bytes), 1 more than its budget of 29 B (29 bytes)"
    judge(chain(2), Compute(0), Compute(1), budget=Budget(device_bytes=30))


def test_sources_alone_exceed_the_device() -> None:
    error = refusal(chain(1), Compute(0), budget=Budget(device_bytes=9))
    assert error.step == 0
    assert "the sources alone" in error.cause


def test_a_reload_exceeds_the_device() -> None:
    graph = graph_of([10, 10], [op(0, [], [1])], results=[0, 1])
    steps = (Offload(0), Free(0), Compute(0), Reload(0))
    error = refusal(graph, *steps, costs=with_levels(graph, Level()), budget=Budget(device_bytes=10))
    assert error.step == 3
    assert "the reload of storage 0" in error.cause


def test_exceeds_the_host_and_the_disk() -> None:
    costs = with_levels(chain(1), Level(), Level())
    assert "the host holds" in refusal(chain(1), Offload(0, 1), Compute(0), costs=costs, budget=Budget(host_bytes=9)).cause
    assert "the disk holds" in refusal(chain(1), Offload(0, 2), Compute(0), costs=costs, budget=Budget(disk_bytes=9)).cause
    timeline = judge(chain(1), Offload(0, 1), Offload(0, 2), Free(0, 1), Compute(0), costs=costs, budget=Budget(host_bytes=10))
    assert timeline.level_peak_bytes == (20, 10, 10)


# -- views, in place, variants ---------------------------------------------------------------------------------------


def viewed() -> Graph:
    """x0 -> f0 -> x1; f1 makes tensor 3, a view of x1; f2 reads the view and makes x2."""
    return graph_of([10, 10, 10], [op(0, [0], [1]), op(1, [1], [3]), op(2, [3], [2])], results=[2], views=[1])


def test_a_view_costs_nothing_and_keeps_its_storage() -> None:
    assert judge(viewed(), Compute(0), Compute(1), Compute(2)).bytes_at_step == (20, 20, 30)


def test_a_view_is_gone_with_its_storage_and_must_be_made_again() -> None:
    again = (Compute(0), Compute(1), Free(1), Compute(0))
    error = refusal(viewed(), *again, Compute(2))
    assert error.step == 4
    assert "its view tensor 3 was not made since" in error.cause
    judge(viewed(), *again, Compute(1), Compute(2))


def test_an_offloaded_storage_brings_back_only_the_views_it_had() -> None:
    costs = with_levels(viewed(), Level())
    early = (Compute(0), Offload(1), Compute(1), Free(1), Reload(1), Compute(2))
    assert refusal(viewed(), *early, costs=costs).step == 5
    judge(viewed(), Compute(0), Compute(1), Offload(1), Free(1), Reload(1), Compute(2), costs=costs)


def overwriting() -> Graph:
    """f0 makes x1; f1 overwrites x1 with x2; f2 reads x2 and makes x3; f3 reads x1."""
    ops = [op(0, [0], [1]), op(1, [1], [2], inplace_of=((2, 1),)), op(2, [2], [3]), op(3, [1], [4])]
    return graph_of([10] * 5, ops, results=[3])


def test_in_place_takes_over_the_bytes() -> None:
    timeline = judge(overwriting(), Compute(0), Compute(1), Compute(2))
    assert timeline.bytes_at_step == (20, 20, 30)


def test_overwrites_a_value_still_needed() -> None:
    error = refusal(overwriting(), Compute(0), Compute(1), Compute(3))
    assert error.step == 2
    assert "was overwritten in place at step 1" in error.cause


def test_in_place_again_lets_go_of_the_overwritten_bytes() -> None:
    timeline = judge(overwriting(), Compute(0), Compute(1), Compute(0), Compute(1), Compute(2))
    assert timeline.bytes_at_step == (20, 20, 30, 30, 30)


def test_a_variant_reads_and_costs_something_else() -> None:
    other = Variant(name="from mask", inputs=(0,), outputs=(2,))
    graph = graph_of([10] * 3, [op(0, [0], [1]), op(1, [1], [2], variants=(other,))], results=[2])
    costs = Costs(op_time_ns=(1, 1), workspace_bytes=(0, 0), variant_time_ns=((), (50,)), variant_workspace_bytes=((), (3,)))
    timeline = judge(graph, Compute(1, 1), costs=costs)
    assert (timeline.time_ns, timeline.bytes_at_step) == (50, (23,))
    assert refusal(graph, Compute(1, 0), costs=costs).step == 0


# -- copies --------------------------------------------------------------------------------------------------------


def test_reloads_what_was_never_offloaded() -> None:
    error = refusal(chain(1), Reload(0), costs=with_levels(chain(1), Level()))
    assert "to which it was never offloaded" in error.cause


def test_copies_that_make_no_sense() -> None:
    costs = with_levels(chain(1), Level())
    assert "already holds a copy" in refusal(chain(1), Offload(0), Offload(0), costs=costs).cause
    assert "still on the device" in refusal(chain(1), Offload(0), Reload(0), costs=costs).cause
    assert "was freed at step 0" in refusal(chain(1), Free(0), Offload(0), costs=costs).cause
    assert "no copy of it" in refusal(chain(1), Free(0, 1), costs=costs).cause
    assert "never offloaded" in refusal(chain(1), Offload(0), Free(0, 1), Free(0), Reload(0), costs=costs).cause


def test_copies_overlap_compute() -> None:
    timeline = judge(chain(3), Compute(0), Offload(1), Compute(1), Compute(2), costs=with_levels(chain(3), SLOW))
    assert timeline.time_ns == 350  # the copy runs from 100 to 350, beside 200 of compute
    assert (timeline.serial_time_ns, timeline.compute_time_ns) == (550, 300)


def test_a_free_waits_for_the_copy() -> None:
    costs = with_levels(chain(3), SLOW)
    assert judge(chain(3), Compute(0), Offload(0), Free(0), Compute(1), Compute(2), costs=costs).time_ns == 100 + 250 + 200


def test_an_overwrite_waits_for_the_copy() -> None:
    costs = with_levels(overwriting(), SLOW)
    assert judge(overwriting(), Compute(0), Offload(1), Compute(1), Compute(2), costs=costs).time_ns == 100 + 250 + 200


def test_a_reader_waits_for_the_reload_and_others_do_not() -> None:
    graph = graph_of([10] * 4, [op(0, [], [1]), op(1, [0], [2]), op(2, [1], [3])], results=[2, 3])
    costs = with_levels(graph, Level(read_latency_ns=300))
    away = (Offload(0), Free(0))
    assert judge(graph, *away, Reload(0), Compute(0), Compute(2), Compute(1), costs=costs).time_ns == 400
    assert judge(graph, *away, Compute(0), Reload(0), Compute(1), Compute(2), costs=costs).time_ns == 600


def test_one_link_copies_one_after_another_and_each_direction_has_its_own() -> None:
    graph = graph_of([10] * 3, [op(0, [], [2])], sources=[0, 1], results=[2])
    costs = with_levels(graph, SLOW, SLOW)
    assert judge(graph, Offload(0, 1), Offload(1, 1), Compute(0), costs=costs).time_ns == 500
    assert judge(graph, Offload(0, 1), Offload(1, 2), Compute(0), costs=costs).time_ns == 250


def test_freeing_a_level_waits_for_the_reload_from_it() -> None:
    costs = with_levels(chain(1), SLOW)
    steps = (Offload(0), Free(0), Reload(0), Free(0, 1), Compute(0))
    assert judge(chain(1), *steps, costs=costs).time_ns == 250 + 300 + 100


def test_a_copy_stays_below_until_freed() -> None:
    costs = with_levels(chain(1), Level())
    steps = (Offload(0), Free(0), Reload(0), Free(0), Reload(0), Free(0, 1), Compute(0))
    assert judge(chain(1), *steps, costs=costs).level_peak_bytes == (20, 10)
