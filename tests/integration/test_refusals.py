"""A refused budget is told in the user's own terms: what the process holds besides the step counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import InfeasibleBudget

_HELD = 5 * 2**20


def test_the_least_budget_counts_what_is_held_outside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)

    def fit(budget: int) -> Any:
        return memfit.fit(model, (x,), budget=budget, loss_fn=lambda out: out.sum(), time_limit_s=2, check=False)

    with pytest.raises(InfeasibleBudget) as alone:
        fit(1000)
    monkeypatch.setattr("memfit.pipeline.prepare.count_held_elsewhere", lambda *_: _HELD)
    with pytest.raises(InfeasibleBudget, match=r"5\.00 MiB of the budget of 1000 B are held outside the step") as beside:
        fit(1000)
    assert alone.value.minimum_bytes is not None
    assert beside.value.minimum_bytes == alone.value.minimum_bytes + _HELD
    with pytest.raises(InfeasibleBudget):
        fit(beside.value.minimum_bytes - 1)
