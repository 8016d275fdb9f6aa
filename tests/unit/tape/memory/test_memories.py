"""Bytes: every mode's prediction equals what tracemalloc sees, and the modes rank as the documents say."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import numpy as np
import pytest

from memfit import planning, tape
from memfit.core import (
    Budget,
    Compute,
    Costs,
    Free,
    Graph,
    Layout,
    Level,
    Offload,
    Plan,
    Reload,
    Schedule,
    check_layout,
    lifetimes,
    max_load,
    simulate,
)
from memfit.core.errors import BadInput, Unsupported
from memfit.offsets import layout_plan
from memfit.planning.baselines.sqrt_segments import SqrtSegments
from memfit.tape.array import Tape
from memfit.tape.examples import nets
from memfit.tape.memory.byte_trace import trace
from memfit.tape.memory.memories import FreeList, Pool
from memfit.tape.memory.modes import Mode, compare, inference_mode, planless_modes, planned_mode
from memfit.tape.memory.sharing_tags import share_tags, two_buffers
from memfit.tape.ops.activations import relu, tanh
from memfit.tape.ops.elementwise import exp
from memfit.tape.plain_schedules import count_recomputations, drop_early, keep_all
from memfit.tape.program import Program

HIDDEN_BYTES = 80 * 1024
"""What NumPy may allocate inside a call whatever the arrays' size: Python objects and one iteration buffer of 8,192 elements."""

NETS = {
    "mlp": lambda: nets.mlp(depth=6, width=8, batch=16),
    "residual": lambda: nets.mlp(depth=4, width=8, batch=16, classes=5, residual=True),
    "lstm": lambda: nets.lstm(steps=3, width=4, batch=3),
    "cnn": lambda: nets.cnn(blocks=3, channels=4, image=8, batch=2),
    "transformer": lambda: nets.transformer(layers=1, width=8, heads=2, length=6, batch=2, vocabulary=11),
    "flash": lambda: nets.transformer(layers=1, width=8, heads=2, length=6, batch=2, vocabulary=11, flash=True),
    "float32": lambda: nets.mlp(depth=3, width=5, batch=3, classes=3, dtype=np.float32),
}


def _program(name: str) -> Program:
    net = NETS[name]()
    return tape.compile_program([net.loss, *tape.gradients(net.loss)])


def _modes(program: Program) -> tuple[Mode, ...]:
    checkpointed = planning.plan(program.graph, program.costs, planner=SqrtSegments(num_segments=3)).require_plan()
    packed = planned_mode("sqrt in an arena", program, checkpointed, place=_packed)
    return (*planless_modes(program, place=_packed), packed, planned_mode("sqrt", program, replace(checkpointed, layout=None)))


def _packed(graph: Graph, schedule: Schedule, costs: Costs) -> Layout:
    return layout_plan(graph, schedule, costs, time_limit_s=0.1, alignment_bytes=8)


@pytest.mark.parametrize("name", NETS)
def test_predicted_bytes_equal_measured_bytes_in_every_mode_and_step(name: str) -> None:
    program = _program(name)
    modes = _modes(program)
    seen = {mode.name: mode.trace() for mode in modes}
    for mode in modes:
        assert seen[mode.name].predicted_bytes == seen[mode.name].measured_bytes, mode.name
        assert seen[mode.name].hidden_bytes < HIDDEN_BYTES
        for a, b in zip(seen["naive"].results, seen[mode.name].results, strict=True):
            np.testing.assert_array_equal(a, b)
    peaks = {name: t.peak_bytes for name, t in seen.items()}
    assert peaks["sqrt"] <= peaks["exact"] < peaks["naive"]
    assert peaks["exact"] <= peaks["pool"] < peaks["naive"]
    assert peaks["arena"] <= peaks["static"] < peaks["naive"]
    assert count_recomputations(modes[-1].schedule) > 0 or name == "float32", "three layers in three segments have nothing to recompute"


def test_big_kernels_allocate_nothing_undeclared() -> None:
    """With arrays of megabytes, a temporary that a kernel did not declare could not hide."""
    for name, net in {
        "cnn": nets.cnn(blocks=1, channels=32, image=64, batch=4),
        "transformer": nets.transformer(layers=1, width=128, heads=4, length=256, batch=2, vocabulary=512),
        "flash": nets.transformer(layers=1, width=128, heads=4, length=256, batch=2, vocabulary=512, flash=True),
        "lstm": nets.lstm(steps=2, width=128, batch=512),
    }.items():
        program = tape.compile_program([net.loss, *tape.gradients(net.loss)])
        schedule = drop_early(program.graph, inplace=True)
        seen = trace(program, schedule)
        assert seen.peak_bytes > 4 * 2**20
        assert seen.hidden_bytes < 4 * HIDDEN_BYTES, name


def test_the_executor_example_of_the_lecture() -> None:
    """SOURCES A2: exp(a b + 3). Naive: three temporaries. In place: one."""
    t = Tape()
    a, b = t.array(np.ones(100)), t.array(np.full(100, 2.0))
    program = tape.compile_program([exp(a * b + 3.0)])
    assert [op.name for op in program.graph.ops] == ["multiply", "add_scalar", "exp"]
    naive, static = keep_all(program.graph), drop_early(program.graph, inplace=True)
    assert trace(program, naive).peak_bytes == 5 * 800
    assert trace(program, static).peak_bytes == 3 * 800
    assert [s.variant for s in static.computes] == [0, 1, 1]
    np.testing.assert_allclose(trace(program, static).results[0], np.exp(5.0))


def test_inplace_only_when_no_other_op_needs_the_value() -> None:
    """SOURCES A5."""
    t = Tape()
    x = t.array(np.arange(4.0))
    y = x * 2.0
    program = tape.compile_program([exp(y) + y, y.sum()])
    static = drop_early(program.graph, inplace=True)
    by_name = {program.graph.ops[s.op].name: s.variant for s in static.computes}
    assert by_name["exp"] == 0, "y is read again by add"
    assert by_name["add"] > 0
    assert by_name["scale"] == 0, "x is the caller's"
    np.testing.assert_allclose(tape.Executor(program, static).run()[0], np.exp(2 * np.arange(4.0)) + 2 * np.arange(4.0))


def test_no_inplace_over_another_view_of_the_same_value() -> None:
    """y + yᵀ in place would overwrite entries that are still to be read."""
    t = Tape()
    y = t.array(np.arange(9.0).reshape(3, 3)) * 1.0
    program = tape.compile_program([y + y.T, y * y])
    assert not program.graph.ops[1].variants
    lone = tape.compile_program([y * y])
    assert len(lone.graph.ops[1].variants) == 1


def test_two_layer_mlp_saves_a_constant_factor() -> None:
    """SOURCES A6: sharing on a two-layer MLP with its gradient."""
    net = nets.mlp(depth=2, width=32, batch=256)
    program = tape.compile_program([net.loss, *tape.gradients(net.loss)])
    rows = {row.name: row for row in compare(planless_modes(program), repeats=1)}
    held = sum(program.graph.size_of(t) for t in program.graph.sources)
    assert all(row.exact and row.same_numbers for row in rows.values())
    assert (rows["naive"].measured_bytes - held) > 2 * (rows["static"].measured_bytes - held)


def test_inference_takes_two_buffers_whatever_the_depth() -> None:
    """SOURCES B9."""
    heights = {}
    for depth, residual in ((2, False), (5, True), (50, False), (50, True)):
        net = nets.mlp(depth=depth, width=8, batch=16, residual=residual)
        program = tape.compile_program([net.output])
        mode = inference_mode(program)
        assert mode.layout is not None
        heights[depth, residual] = mode.layout.height_bytes
        seen = mode.trace()
        assert seen.predicted_bytes == seen.measured_bytes
        np.testing.assert_array_equal(seen.results[0], net.output.numpy())
    assert set(heights.values()) == {2 * 8 * 16 * 8}


def test_two_buffers_refuse_what_is_no_chain() -> None:
    net = nets.mlp(depth=3, width=4, batch=2, residual=True)
    program = tape.compile_program([net.loss, *tape.gradients(net.loss)])
    with pytest.raises(Unsupported, match="third"):
        two_buffers(program.graph, drop_early(program.graph), program.costs)


def test_gradients_are_lazy_and_dropped() -> None:
    """SOURCES D19: a grad buffer per node from the start doubles the forward pass; lazily it costs nothing."""
    size = 200
    t = Tape()
    rng = np.random.default_rng(0)
    weights = [t.parameter(0.02 * rng.standard_normal((size, size))) for _ in range(3)]
    h = t.array(rng.standard_normal((size, size)))
    for w in weights:
        h = h @ w
    loss = h.sum()
    gradients = tape.gradients(loss, zero_buffers=True)
    program = tape.compile_program([loss, *gradients])
    graph, names = program.graph, [op.name for op in program.graph.ops]
    forward = [k for k in range(len(names)) if not program.is_backward[k]]
    grad_buffers = [op for op in graph.ops if op.name == "zeros" and graph.size_of(op.outputs[0]) == size * size * 8]
    sums = {op.id: graph.ops[graph.readers[op.outputs[0]][0]] for op in grad_buffers}
    adjoints = [op.id for op in grad_buffers if sums[op.id].outputs[0] not in graph.results]  # of h3, h2, h1; not of weights
    assert len(adjoints) == 3
    eager: list[int] = []
    for k in forward[:3]:
        eager += [k, adjoints.pop()]
    eager += [k for k in range(len(names)) if k not in eager]
    unit, held = size * size * 8, sum(program.graph.size_of(x) for x in program.graph.sources)
    with_grads = trace(program, drop_early(program.graph, eager)).measured_bytes
    assert [with_grads[k] - held for k in (1, 3, 5)] == [2 * unit, 4 * unit, 6 * unit]  # 64, 128, 192 MB at 2000 x 2000
    lazily = trace(program, drop_early(program.graph))
    assert [lazily.measured_bytes[k] - held for k in (0, 1, 2)] == [unit, 2 * unit, 3 * unit]
    plain = tape.compile_program([loss, *tape.gradients(loss)])
    assert trace(plain, drop_early(plain.graph)).peak_bytes <= lazily.peak_bytes < max(with_grads)
    for a, b in zip(lazily.results, trace(plain, keep_all(plain.graph)).results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_offload_and_reload_run_and_count_only_the_device() -> None:
    t = Tape()
    x = t.array(np.arange(64.0))
    y = x * 2.0
    program = tape.compile_program([exp(y * 0.001) + y])
    first, second, third, last = (op.id for op in program.graph.ops)
    for level in (1, 2):
        moved = program.graph.storage_of(program.graph.ops[first].outputs[0])
        steps = (
            Compute(first), Compute(second), Offload(moved, level), Free(moved), Compute(third),
            Free(program.graph.storage_of(program.graph.ops[second].outputs[0])), Reload(moved, level), Free(moved, level), Compute(last),
        )  # fmt: skip
        with_levels = replace(program, costs=replace(program.costs, levels=(Level(), Level())))
        seen = trace(with_levels, Schedule(steps=steps))
        assert seen.predicted_bytes == seen.measured_bytes
        np.testing.assert_array_equal(seen.results[0], np.exp(np.arange(64.0) * 2 * 0.001) + np.arange(64.0) * 2)


def test_recomputing_beside_a_live_copy_uses_scratch() -> None:
    t = Tape()
    y = t.array(np.arange(4.0)) * 2.0
    program = tape.compile_program([exp(y)])
    steps = (Compute(0), Compute(0), Compute(1), Free(program.graph.storage_of(program.graph.ops[0].outputs[0])))
    seen = trace(program, Schedule(steps=steps))
    assert seen.predicted_bytes == seen.measured_bytes == (64, 96, 96, 64)


def test_a_plan_of_another_program_is_refused() -> None:
    one, other = _program("mlp"), _program("lstm")
    plan = planning.plan(one.graph, one.costs, planner="keep_all").require_plan()
    assert isinstance(plan, Plan)
    np.testing.assert_array_equal(tape.Executor.of_plan(one, plan).run()[0], trace(one, keep_all(one.graph)).results[0])
    with pytest.raises(BadInput, match="plan this program again"):
        tape.Executor.of_plan(other, plan)
    schedule = keep_all(one.graph)
    with pytest.raises(BadInput, match="another schedule"):
        tape.Executor(one, schedule, layout=share_tags(other.graph, keep_all(other.graph), other.costs))
    with pytest.raises(BadInput, match="not there"):
        tape.Executor(one, Schedule(steps=(Compute(3),)))


def test_budgeted_plans_run_within_their_budget() -> None:
    net = nets.mlp(depth=12, width=4, batch=256)
    program = tape.compile_program([net.loss, *tape.gradients(net.loss)])
    full = simulate(program.graph, drop_early(program.graph), program.costs).peak_bytes
    budget = int(0.6 * full)
    plan = planning.plan(program.graph, program.costs, Budget(device_bytes=budget), planner="greedy").require_plan()
    seen = trace(program, plan.schedule)
    assert seen.peak_bytes <= budget
    assert seen.predicted_bytes == seen.measured_bytes


def test_feeds_replace_leaves_and_are_checked() -> None:
    t = Tape()
    given = np.ones(3)
    x, w = t.array(given), t.parameter(np.full(3, 2.0))
    program = tape.compile_program([(x * w).sum()])
    for layout in (None, share_tags(program.graph, keep_all(program.graph), program.costs)):
        run = tape.Executor(program, keep_all(program.graph), layout=layout)
        assert run.run({x: np.arange(3.0)})[0] == 6.0
        assert run.run({w: np.ones(3)})[0] == 3.0
        w.data[...] = 2.0
        assert run.run({x: np.ones(3)})[0] == 6.0
        with pytest.raises(BadInput, match="shape"):
            run.run({x: np.ones(4)})
    np.testing.assert_array_equal(given, np.ones(3))


def test_tags_never_overlap_and_the_pool_recycles() -> None:
    for name in NETS:
        program = _program(name)
        schedule = drop_early(program.graph, inplace=True)
        items = lifetimes(program.graph, schedule, program.costs)
        layout = share_tags(program.graph, schedule, program.costs)
        check_layout(items, layout)
        assert max_load(items) <= layout.height_bytes
    free = FreeList()
    first, _ = free.take(100)
    free.give_back(first)
    assert free.take(60) == (first, False)
    assert free.take(60)[1]
    free.give_back(first)
    assert free.take(40)[1], "a block more than twice too large is left for others"


def test_pool_keeps_what_it_recycles() -> None:
    program = _program("mlp")
    seen = trace(program, drop_early(program.graph), memory=Pool)
    assert list(seen.measured_bytes) == sorted(seen.measured_bytes), "a pool never returns bytes"


def test_depth_costs_n_bytes_and_root_n_with_checkpoints() -> None:
    """SOURCES A7, B10, by the judge: activations grow as n, and as √n with √n segments."""
    peaks = {}
    for depth in (36, 576):
        net = nets.mlp(depth=depth, width=2, batch=512)
        program = tape.compile_program([net.loss, *tape.gradients(net.loss)])
        held = sum(program.graph.size_of(t) for t in program.graph.sources)
        plan = planning.plan(program.graph, program.costs, planner=SqrtSegments(num_segments=isqrt(depth))).require_plan()
        exact = simulate(program.graph, drop_early(program.graph), program.costs).peak_bytes
        peaks[depth] = (exact - held, plan.timeline.peak_bytes - held)
    linear, root = (peaks[576][k] / peaks[36][k] for k in (0, 1))
    assert 15 < linear < 17
    assert 3 < root < 5


def test_relu_and_tanh_overwrite_their_input() -> None:
    for op in (relu, tanh):
        t = Tape()
        program = tape.compile_program([op(t.array(np.linspace(-1, 1, 8)) * 3.0)])
        np.testing.assert_array_equal(
            tape.Executor(program, drop_early(program.graph, inplace=True)).run()[0],
            tape.Executor(program, keep_all(program.graph)).run()[0],
        )
