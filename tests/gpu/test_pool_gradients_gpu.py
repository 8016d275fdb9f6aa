"""Gradients of max pools gathered on a CUDA device: the plain model's, without a buffer as large as the pool's input."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.capture.test_pool_gradients import POOLS, network, regions, run
from torch import nn

from memfit.execute.inductor import Inductor
from memfit.profile.allocations import peaks_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_plain_model_s_gradients(pool: nn.Module) -> None:
    model, x, y = (part.cuda() for part in network(pool))
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    captured = regions(model, x, y, Inductor())
    found, inputs = run(captured, model, x, y)
    assert inputs
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-9, atol=1e-12)
    ((op, args),) = inputs.items()
    form = next(k for k, v in enumerate(captured.graph.ops[op].variants, 1) if v.name.startswith("gathered"))
    target = captured.call(op, form).target
    assert target is not None
    left, peak = peaks_of(lambda: target(*args), torch.device("cuda"))
    assert peak - left < max(t.nbytes for t in args) / 2
