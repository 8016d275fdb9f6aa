"""Planners on the tape's networks: dropping cheap results, measured costs, and training in the planned step."""

from __future__ import annotations

import numpy as np
import pytest

from memfit import load, planning, save, tape
from memfit.core import simulate
from memfit.core.errors import BadInput
from memfit.tape.examples import nets
from memfit.tape.examples.training import spirals, train
from memfit.tape.memory.byte_trace import trace
from memfit.tape.memory.measure import measure_costs
from memfit.tape.memory.modes import Mode, compare, planned_mode
from memfit.tape.memory.sharing_tags import share_tags
from memfit.tape.plain_schedules import drop_early


def test_cheap_results_are_dropped_and_convolutions_kept() -> None:
    """SOURCES A7: drop batch norm, activation and pooling; keep what convolutions made."""
    net = nets.cnn(blocks=3, channels=8, image=16, batch=8)
    program = tape.compile_program([net.loss, *tape.gradients(net.loss, net.parameters)])
    full = simulate(program.graph, drop_early(program.graph), program.costs).peak_bytes
    plan = planning.plan(program.graph, program.costs, int(0.8 * full), planner="drop_cheap").require_plan()
    seen: set[int] = set()
    repeated = {program.graph.ops[s.op].name for s in plan.schedule.computes if s.op in seen or seen.add(s.op)}
    assert repeated
    assert repeated <= {"batch_norm", "relu", "max_pool2d", "add"}
    measured = trace(program, plan.schedule)
    assert measured.predicted_bytes == measured.measured_bytes
    assert measured.peak_bytes <= 0.8 * full


def test_measured_costs_are_of_the_same_graph() -> None:
    net = nets.mlp(depth=3, width=64, batch=64)
    program = tape.compile_program([net.loss, *tape.gradients(net.loss)])
    measured = measure_costs(program, repeats=2)
    assert measured.costs.graph_digest == program.graph.digest
    assert measured.costs.workspace_bytes == program.costs.workspace_bytes
    assert min(measured.costs.op_time_ns) >= 1
    assert measured.costs.device != program.costs.device


def test_training_is_the_same_in_every_mode(tmp_path) -> None:  # type: ignore[no-untyped-def]
    net = nets.mlp(depth=6, width=12, batch=96, features=2, classes=3, residual=True)
    program = tape.compile_program([net.loss, *tape.gradients(net.loss, net.parameters)])
    full = simulate(program.graph, drop_early(program.graph), program.costs).peak_bytes
    plan = planning.plan(program.graph, program.costs, int(0.7 * full), planner="greedy").require_plan()
    save(plan, tmp_path / "plan.json")  # a plan is data: saved, shipped, loaded, run
    shipped = load(tmp_path / "plan.json")
    modes = [
        Mode(name="exact", program=program, schedule=drop_early(program.graph)),
        planned_mode("planned", program, shipped),
        planned_mode("planned in an arena", program, shipped, place=share_tags),
    ]
    before = [p.data.copy() for p in net.parameters]
    runs = [train(net, mode, spirals(96), steps=25, rate=0.05) for mode in modes]
    assert len({run.losses for run in runs}) == 1
    assert runs[0].losses[-1] < 0.5 * runs[0].losses[0]
    assert all(np.array_equal(a, p.data) for a, p in zip(before, net.parameters, strict=True)), "parameters are put back"
    rows = compare(modes, repeats=1)
    assert all(row.exact and row.same_numbers for row in rows)
    assert rows[1].num_recomputed > 0
    assert rows[1].recomputed_fraction > 0


def test_nets_refuse_impossible_sizes() -> None:
    with pytest.raises(BadInput, match="depth is 0"):
        nets.mlp(depth=0, width=4, batch=4)
    with pytest.raises(BadInput, match="multiple"):
        nets.transformer(layers=1, width=5, heads=2, length=3, batch=1, vocabulary=7)
    with pytest.raises(BadInput, match="at least one"):
        spirals(0)
    with pytest.raises(BadInput, match="at least one result"):
        tape.compile_program([])
