"""Gradients of max pools gathered on a CUDA device: the plain model's, without a buffer as large as the pool's input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.unit.capture.test_pool_gradients import LEFT_ALONE, POOLS, network, regions, run
from torch import nn

from memfit.execute.inductor import Inductor
from memfit.profile.allocations import peaks_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gradients_of(pool: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[int, Any]]:
    """Runs the step by its regions, gathered where that is offered; its gradients are the plain model's."""
    torch.backends.cudnn.allow_tf32 = False
    model, x, y = (part.cuda() for part in network(pool))
    model, x = model.to(dtype), x.to(dtype)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    captured = regions(model, x, y, Inductor())
    found, inputs = run(captured, model, x, y)
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        near = 1e-9 if dtype is torch.float64 else 1e-4
        torch.testing.assert_close(found[position], parameter.grad, rtol=near, atol=near * float(parameter.grad.abs().max()))
    return captured, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pool", LEFT_ALONE, ids=str)
def test_windows_that_overlap_at_the_border(pool: nn.Module, dtype: torch.dtype) -> None:
    """In double precision torch.compile itself is wrong here (torch 2.11): memfit scatters."""
    _, inputs = gradients_of(pool, dtype)
    assert not inputs


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_plain_model_s_gradients(pool: nn.Module) -> None:
    captured, inputs = gradients_of(pool)
    assert inputs
    ((op, args),) = inputs.items()
    form = next(k for k, v in enumerate(captured.graph.ops[op].variants, 1) if v.name.startswith("gathered"))
    target = captured.call(op, form).target
    assert target is not None
    left, peak = peaks_of(lambda: target(*args), torch.device("cuda"))
    assert peak - left < max(t.nbytes for t in args) / 2
