"""Generated programs, replayed random numbers, and gradients put away."""

from __future__ import annotations

import pytest
import torch
from tests.training import CPU, batch, deep
from torch import nn

from memfit.capture.inputs import Call
from memfit.core.errors import Unsupported
from memfit.core.schedule import Compute, Free, Offload, Schedule
from memfit.pipeline.capture import capture
from memfit.planning import plan
from memfit.runtime.check import Verdict
from memfit.runtime.codegen import generate
from memfit.runtime.gradients import GradientSink, accumulate
from memfit.runtime.rng import RandomStates


def test_the_program_frees_with_del_and_drops_tuples_at_once() -> None:
    captured = capture(deep(), Call.flatten((batch()[0],), {}))
    source = generate(captured, plan(captured.graph, None, None, planner="keep_all").require_plan().schedule).source
    lines = [line.strip() for line in source.splitlines()]
    unpacked = [i for i, line in enumerate(lines) if line.startswith("t = ")]
    assert unpacked
    for i in unpacked:
        rest = lines[i + 1 :]
        assert all(" = t[" in line for line in rest[: rest.index("del t")])
    assert "saved.clear()" in lines
    assert sum(line.startswith("del v") for line in lines) > 10
    assert sum(line.startswith("put(") for line in lines) == len(list(deep().parameters()))


def test_a_program_computes_the_models_output() -> None:
    model = deep().eval()
    x, _ = batch()
    captured = capture(model, Call.flatten((x,), {}), training=False)
    program = generate(captured, plan(captured.graph, None, None, planner="keep_all").require_plan().schedule)
    assert program.backward is None
    with torch.no_grad():
        outputs, _, _ = program.forward([*model.parameters(), *model.buffers(), x], RandomStates(CPU))
        assert torch.equal(outputs[0], model(x))


def test_steps_that_the_engine_cannot_run_are_refused() -> None:
    captured = capture(nn.Linear(2, 2), Call.flatten((torch.randn(1, 2),), {}))
    storage = captured.graph.storage_of(captured.graph.ops[1].outputs[0])
    with pytest.raises(Unsupported, match="disk"):
        generate(captured, Schedule(steps=(Compute(op=0), Compute(op=1), Offload(storage=storage, level=2), Free(storage=storage))))


def test_replayed_random_numbers_are_the_same_and_disturb_nothing() -> None:
    replay = RandomStates(CPU)
    torch.manual_seed(0)
    draw = torch.ops.aten.rand.default
    first = replay.draw(7, draw, [4])
    between = torch.rand(4)
    again = replay.redraw(7, draw, [4])
    after = torch.rand(4)
    torch.manual_seed(0)
    assert torch.equal(first, again)
    assert torch.equal(torch.cat([first, between, after]), torch.cat([torch.rand(4) for _ in range(3)]))


def test_gradients_are_kept_copied_or_added() -> None:
    leaf = nn.Parameter(torch.zeros(2, 3))
    gradient = torch.ones(2, 3)
    accumulate(leaf, gradient, True)
    assert leaf.grad.data_ptr() == gradient.data_ptr()
    accumulate(leaf, gradient.clone(), True)
    assert torch.equal(leaf.grad, torch.full((2, 3), 2.0))
    other = nn.Parameter(torch.zeros(2, 3))
    strided = torch.ones(3, 2).t()
    accumulate(other, strided, True)
    assert other.grad.stride() == other.stride()


def test_a_gradient_is_put_once_even_when_backward_is_repeated() -> None:
    leaf = nn.Parameter(torch.zeros(2))
    sink = GradientSink((leaf,), frozenset())
    sink.put(0, torch.ones(2), True)
    sink.put(0, torch.ones(2), True)
    assert torch.equal(leaf.grad, torch.ones(2))


def test_a_verdict_allows_rounding_and_the_models_own_noise() -> None:
    assert Verdict(identical=True, worst_fraction=0.0, where="").acceptable
    assert Verdict(identical=False, worst_fraction=1e-6, where="w").acceptable
    assert not Verdict(identical=False, worst_fraction=0.3, where="w").acceptable
    assert Verdict(identical=False, worst_fraction=0.3, where="w", noise_fraction=0.2).acceptable
    assert not Verdict(identical=False, worst_fraction=float("inf"), where="w").acceptable
    assert "bit for bit" in Verdict(identical=True, worst_fraction=0.0, where="").sentence()
