"""Counters of batch norms together: one op for all, and every buffer as the plain model leaves it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.captured_steps import fine
from tests.training import needs_a_compiler
from tests.unit.passes.regions.test_regions import OneByOne
from torch import nn

import memfit

aten = torch.ops.aten


def norms(count: int) -> nn.Module:
    """Convolutions with a bias before each norm: its gradient is nothing but rounding."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(count)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 4, 8, 8, dtype=torch.float64), torch.randint(0, 5, (3,))


@pytest.mark.parametrize(("count", "together"), [(1, 0), (2, 1), (5, 1)])
def test_one_op_for_all(count: int, together: int) -> None:
    captured = fine(norms(count), *data(), OneByOne())
    assert [c.target for c in captured.calls].count(aten._foreach_add.Scalar) == together


@needs_a_compiler
def test_training_leaves_the_plain_model_s_buffers() -> None:
    model, (x, y) = norms(3), data()
    plain = copy.deepcopy(model)
    fitted = memfit.fit(
        model, (x,), budget="1GiB", loss_fn=nn.functional.cross_entropy, example_targets=(y,), engine="inductor", check=True, time_limit_s=2
    )
    for _ in range(3):
        fitted(x, y).backward()
        nn.functional.cross_entropy(plain(x), y).backward()
    for (name, found), wanted in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
    assert all(int(b) == 3 for n, b in model.named_buffers() if n.endswith("num_batches_tracked"))
