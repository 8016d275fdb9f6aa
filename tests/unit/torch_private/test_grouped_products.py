"""Mixtures of experts in single precision: their grouped products are traced as their kernels take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training import same, twin
from torch import nn

import memfit

_GROUPED = getattr(torch, "_grouped_mm", None)


class Experts(nn.Module):
    """Every row goes to one of four experts, in order of the experts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(4, 16, 32, dtype=dtype) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = (
            torch.zeros(4, dtype=torch.int32)
            .scatter_add(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
            .cumsum(0, dtype=torch.int32)
        )
        made = _GROUPED(x[order], self.experts, offs=ends)  # type: ignore[misc]
        return (made.relu() * weight[order, None]).square()


@pytest.mark.skipif(_GROUPED is None, reason="this torch has no grouped products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_train_as_the_plain_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Experts(dtype), torch.randn(64, 16, dtype=dtype)
    plain = twin(model)
    fitted: Any = memfit.fit(model, (x,), budget="64MiB", loss_fn=torch.mean)
    for _ in range(2):
        loss, expected = fitted(x), plain(x).mean()
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
    assert all(same(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
