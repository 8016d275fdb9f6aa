"""A fitted model's step replayed from CUDA graphs, memfit's own or the caller's: new inputs, the plain model's gradients, new random numbers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from tests.gpu.test_inductor_gpu import convolutions, fit, language, without_dropout
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def captured(fitted: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """As docs/how-to/cuda-graphs.md has it: some steps on a side stream first, the checked ones among them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            fitted.zero_grad(set_to_none=True)
            fitted(x, y).backward()
    torch.cuda.current_stream().wait_stream(side)
    fitted.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = fitted(x, y)
        loss.backward()
    return graph, loss


def milliseconds(step: Callable[[], object]) -> float:
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 20 * 1e3


@pytest.mark.parametrize("example", [convolutions, language])
def test_training_with_replay_is_the_plain_training(example: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]) -> None:
    model, x, y = example()
    without_dropout(model)
    plain = copy.deepcopy(model)
    whole = fit(copy.deepcopy(model), x, y, "100GiB")
    budget = int(0.7 * whole.plan.timeline.peak_bytes)
    del whole
    fitted = fit(model, x, y, budget, replay=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    losses = []
    for number in range(9):
        given = x + 0.1 * number if x.is_floating_point() else (x + number) % 1000
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours, theirs = fitted(given, y), nn.functional.cross_entropy(plain(given), y)
        ours.backward()
        theirs.backward()
        losses.append((ours.detach(), theirs.detach()))
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert float((mine.grad - other.grad).abs().max()) <= 1e-7 * max(1.0, float(other.grad.abs().max())), (number, name)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in losses:
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    notes = fitted.report().notes
    assert any(n.startswith("replayed from CUDA graphs") for n in notes), notes
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_replay_draws_new_random_numbers_and_takes_no_more_than_the_budget() -> None:
    model, x, y = language()
    before = torch.cuda.memory_reserved()
    fitted = fit(model, x, y, "100GiB", check=False)
    peak = fitted.plan.timeline.peak_bytes
    del fitted
    fitted = fit(model, x, y, int(0.8 * peak), check=False, replay=True)
    losses = []
    for _ in range(8):
        fitted.zero_grad()
        loss = fitted(x, y)
        loss.backward()
        losses.append(loss.detach())
    assert len({float(loss) for loss in losses}) == 8
    assert any(n.startswith("replayed from CUDA graphs") for n in fitted.report().notes), fitted.report()
    torch.cuda.empty_cache()
    print("GiB: budget", 0.8 * peak / 2**30, "reserved", torch.cuda.memory_reserved() / 2**30, "before", before / 2**30)
    assert torch.cuda.memory_reserved() <= 0.8 * peak * 1.15 + 64 * 2**20 + before


@pytest.mark.parametrize("example", [convolutions, language])
def test_a_replayed_step_has_the_plain_gradients_of_its_new_inputs(
    example: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]],
) -> None:
    model, x, y = example()
    without_dropout(model)
    plain = copy.deepcopy(model)
    whole = fit(copy.deepcopy(model), x, y, "100GiB")
    fitted = fit(model, x, y, int(0.7 * whole.plan.timeline.peak_bytes))
    graph, loss = captured(fitted, x, y)
    if x.is_floating_point():
        x.copy_(torch.randn_like(x))
    y.copy_(y.roll(1, 0))
    graph.replay()
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert float((ours.grad - theirs.grad).abs().max()) <= 1e-8 * max(1.0, float(theirs.grad.abs().max())), name

    def step() -> None:
        fitted.zero_grad(set_to_none=True)
        fitted(x, y).backward()

    print(example.__name__, "ms a step:", round(milliseconds(graph.replay), 3), "replayed,", round(milliseconds(step), 3), "called")


def test_every_replay_draws_new_random_numbers() -> None:
    model, x, y = language()
    fitted = fit(model, x, y, "100GiB")
    graph, loss = captured(fitted, x, y)
    losses = []
    for _ in range(3):
        graph.replay()
        losses.append(loss.item())
    assert len(set(losses)) == 3
