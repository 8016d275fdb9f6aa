"""Packed projections apart: three products instead of one and a copy, with the plain model's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.captured_steps import assert_plain, fine, regions, run
from tests.training import needs_a_compiler
from tests.unit.passes.regions.test_regions import OneByOne
from torch import nn

from memfit.capture.captured import Captured
from memfit.compilers.inductor.compiler import Inductor

aten = torch.ops.aten


class Attending(nn.Module):
    """A norm, attention and a residual, as in a transformer's block."""

    def __init__(self, *, bias: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)
        self.attention = nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        return self.head((x + self.attention(y, y, y, need_weights=False)[0]).mean(1))


class Peeking(Attending):
    """Reads the packed projection for something else as well."""

    def forward(self, x: torch.Tensor) -> Any:
        attention = self.attention
        packed = nn.functional.linear(self.norm(x), attention.in_proj_weight, attention.in_proj_bias)
        q, k, v = packed.unflatten(-1, (3, 32)).movedim(2, 0).contiguous().unbind(0)
        y = nn.functional.scaled_dot_product_attention(*(t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v)))
        return self.head((x + attention.out_proj(y.transpose(1, 2).flatten(2))).mean(1) + packed.mean())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 7, 32, dtype=torch.float64), torch.randint(0, 5, (5,))


def products(captured: Captured) -> list[tuple[int, ...]]:
    """Shapes of what forward's products make: those before the first gradient."""
    calls = captured.calls
    begin = next(k for k, c in enumerate(calls) if c.role.name == "BACKWARD_BEGINS")
    made = [c.outputs[0] for c in calls[:begin] if c.target in (aten.mm.default, aten.addmm.default)]
    return [tuple(s.shape) for t in made if t is not None and (s := captured.samples[t]) is not None]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.passes.fx.split_projections._LEAST_BYTES", 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_three_products_and_the_plain_gradients(bias: bool, batch_first: bool) -> None:
    model, (x, y) = Attending(bias=bias, batch_first=batch_first).double(), data()
    assert products(fine(copy.deepcopy(model), x, y, OneByOne()))[:3] == [(35, 32)] * 3
    found, _ = run(regions(copy.deepcopy(model), x, y, OneByOne()), model, x, y)
    assert_plain(found, model, x, y)


@needs_a_compiler
def test_compiled() -> None:
    model, (x, y) = Attending().double(), data()
    found, _ = run(regions(copy.deepcopy(model), x, y, Inductor()), model, x, y)
    assert_plain(found, model, x, y)


def test_small_ones_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, (x, y) = Attending().double(), data()
    assert products(fine(model, x, y, OneByOne()))[0] == (35, 96)


def test_another_reader_of_the_packed_one() -> None:
    model, (x, y) = Peeking().double(), data()
    assert products(fine(copy.deepcopy(model), x, y, OneByOne()))[0] == (35, 96)
    found, _ = run(regions(copy.deepcopy(model), x, y, OneByOne()), model, x, y)
    assert_plain(found, model, x, y)


class Flat(Attending):
    """Copies all of a product as one line, and reads one number of it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        chosen = nn.functional.linear(y, self.attention.in_proj_weight).flatten().clone()[3]
        return self.head((x + self.attention(y, y, y, need_weights=False)[0]).mean(1) + chosen)


def test_a_product_copied_as_a_line() -> None:
    model, (x, y) = Flat().double(), data()
    found, _ = run(regions(copy.deepcopy(model), x, y, OneByOne()), model, x, y)
    assert_plain(found, model, x, y)
