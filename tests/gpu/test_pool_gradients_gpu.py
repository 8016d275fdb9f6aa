"""Gradients of max pools gathered on a CUDA device: the plain model's, without a buffer as large as the pool's input."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.captured_steps import assert_plain, regions, run
from tests.unit.passes.fx.test_max_pool_gradient import POOLS, network
from torch import nn

from memfit.compilers.inductor.compiler import Inductor
from memfit.torch_private.allocations import peaks_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["double", "single"])
@pytest.mark.parametrize("channels_last", [True, False], ids=["last", "planar"])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_plain_model_s_gradients(pool: nn.Module, channels_last: bool, dtype: torch.dtype, near: float) -> None:
    """(torch.compile itself is wrong in double precision for windows that overlap at the border, torch 2.11: there it adds up, in a buffer.)"""
    torch.backends.cudnn.allow_tf32 = False
    model, x, y = (part.cuda() for part in network(pool, channels_last=channels_last))
    model, x = model.to(dtype), x.to(dtype)
    captured = regions(copy.deepcopy(model), x, y, Inductor())
    found, inputs = run(captured, model, x, y)
    assert_plain(found, model, x, y, near=near)
    if dtype is torch.float64:
        return
    last = max(op for op, args in inputs.items() if any(getattr(a, "dtype", None) is torch.int8 for a in args))
    target, args = captured.calls[last].target, inputs[last]
    assert target is not None
    left, peak = peaks_of(lambda: target(*args), torch.device("cuda"))
    assert peak - left < max(t.nbytes for t in args) / 2
