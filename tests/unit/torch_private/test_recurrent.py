"""Recurrent layers are traced as what they compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit


def double(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: 2 * linear(*args, **kwargs)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_replaced_linear_changes_the_head_and_not_the_cells(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.cells(x)[0])
            return out.sum()

    monkeypatch.setattr(functional, "linear", double(functional.linear))
    model, x = Net().double(), torch.randn(3, 6, 4, dtype=torch.float64)
    model(x).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda loss: loss)(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
