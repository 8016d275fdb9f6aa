"""Inside a budget at every length: plans found for one length serve others, and what is measured stays below the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.pipeline import open_sizes

WIDTH, WORDS = 32, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(self.first(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.dropout(functional.gelu(self.up(self.second(x))), 0.1, self.training))


class Writer(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.blocks, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Sequential(*(Block() for _ in range(depth))),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens)))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rows + length)
    tokens = torch.randint(0, WORDS, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def fit(model: nn.Module, size: tuple[int, int], budget: int, **options: Any) -> Any:
    tokens, labels = batch(*size)
    return memfit.fit(model, (tokens,), budget=budget, loss_fn=loss, example_targets=(labels,), time_limit_s=3, **options)


def step(model: nn.Module, call: Any, size: tuple[int, int]) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(7)
    value = call(*batch(*size))
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture
def sought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For which lengths a plan was sought."""
    found: list[int] = []
    seek = open_sizes.OpenPreparer._seek

    def counted(self: Any, order: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(order.call.tensors[0].shape[1])
        return seek(self, order, *args, **kwargs)

    monkeypatch.setattr(open_sizes.OpenPreparer, "_seek", counted)
    return found


@pytest.mark.parametrize("share", [2.0, 0.7])
def test_every_length_is_inside_the_budget_and_exact(share: float, sought: list[int]) -> None:
    plain = Writer()
    longest = 96
    peak = fit(copy.deepcopy(plain), (8, longest), 2**40, planner="keep_all").report().predicted_peak_bytes
    model, budget = copy.deepcopy(plain), int(peak * share)
    fitted = fit(model, (8, 80), budget, allow=("recompute",), check=True)
    lengths = [80, 96, 40, 95, 90, 94, 85, 93, 60, 91, 92, 3]
    for size in (*((8, n) for n in lengths), (3, 77), (8, 96)):
        expected = step(plain, lambda x, y: loss(plain(x), y), size)
        assert all(torch.equal(a, b) for a, b in zip(step(model, fitted, size), expected, strict=True))
        report = fitted.report()
        assert report.predicted_peak_bytes <= budget
        if report.measured_peak_bytes is not None:
            assert report.measured_peak_bytes <= budget
    assert sought[0] == 96
    assert len(sought) == 1 if share > 1 else len(sought) < 8


def test_a_length_that_fits_in_no_plan_is_refused_and_others_go_on() -> None:
    plain = Writer()
    peak = fit(copy.deepcopy(plain), (8, 40), 2**40, planner="keep_all").report().predicted_peak_bytes
    model = copy.deepcopy(plain)
    fitted = fit(model, (8, 40), peak, allow=("recompute",))
    step(model, fitted, (8, 30))
    with pytest.raises(memfit.InfeasibleBudget):
        step(model, fitted, (8, 4000))
    expected = step(plain, lambda x, y: loss(plain(x), y), (8, 35))
    assert all(torch.equal(a, b) for a, b in zip(step(model, fitted, (8, 35)), expected, strict=True))


def test_an_optimizer_is_counted_at_every_length() -> None:
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = fit(model, (8, 40), 2**40, optimizer=optimizer, planner="keep_all")
    state = []
    for length in (40, 30, 31, 32):
        step(model, fitted, (8, length))
        graph = fitted._memfit.latest.ready.captured.graph
        state.append([s.size_bytes for s in graph.storages if s.name == "optimizer state"])
        optimizer.step()
    assert state == [state[0]] * 4
    assert state[0][0] > 0
