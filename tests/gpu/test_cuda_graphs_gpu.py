"""A fitted model's step captured in a CUDA graph and replayed: new inputs, the plain model's gradients, new random numbers."""

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
