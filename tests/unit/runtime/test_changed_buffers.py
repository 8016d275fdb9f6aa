"""Large buffers that forward reads and changes: the copies that a step keeps of them are in the plan, from the first step on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.storage_meter import StorageMeter
from tests.training import fit_tight, held_bytes, same, twin
from torch import nn

import memfit

KINDS = ["queue", "average", "rolled", "only written"]


class Bank(nn.Module):
    """A layer of a few numbers beside a bank of many."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, nn.Linear(16, 16)
        self.register_buffer("bank", torch.randn(16, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if self.kind == "only written":
            self.bank.mul_(0.9).add_(0.1 * h.detach().mean())
            return h.square().mean()
        loss = (h @ self.bank.clone()).sin().mean()
        if self.kind == "queue":  # MoCo
            self.bank[:, : len(x)] = h.detach().t()
        elif self.kind == "average":
            self.bank.mul_(0.9).add_(0.1 * h.detach().mean())
        else:
            self.bank.copy_(torch.roll(self.bank, 1, 1))
        return loss


@pytest.mark.parametrize("fraction", [1.0, 0.97])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_is_counted_to_the_byte_and_stays_inside(kind: str, fraction: float) -> None:
    plain, x = Bank(kind), torch.randn(8, 16)
    model = twin(plain)
    fitted: Any = fit_tight(model, (x,), fraction=fraction, check=False, planner="auto")
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        before = held_bytes(model, None, x)
        with StorageMeter() as meter:
            fitted(x).backward()
        measured = before + meter.peak
        assert measured <= fitted.report().budget_bytes
        assert abs(fitted.plan.timeline.peak_bytes - measured) <= 16
        plain(x).backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        assert torch.equal(model.bank, plain.bank)


def test_copies_are_gone_after_backward() -> None:
    model, x = Bank("rolled"), torch.randn(8, 16)
    fitted: Any = fit_tight(model, (x,), fraction=1.0)
    fitted(x).backward()
    model.zero_grad()
    with StorageMeter() as meter:
        loss = fitted(x)
        loss.backward()
        assert meter.held < model.bank.nbytes
        assert loss.grad_fn is not None


class ReadThroughView(nn.Module):
    """Backward reads a view of a buffer that forward changes after reading it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, nn.Linear(8, 8)
        bank = torch.randn(8, 32)
        self.register_buffer("bank", {"every second": torch.randn(8, 64)[:, ::2], "transposed": bank.t().contiguous().t()}.get(kind, bank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        out = h + (h @ self.bank.clone() @ self.bank.clone().t()).sin()
        if self.kind == "part":
            out = out * self.bank[2:, 4:12].clone().sum(0).sin()
            self.bank[1:5].mul_(2)
        self.bank.copy_(torch.roll(self.bank, 1, 1) * 0.5)
        return out.square().mean()


@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["whole", "part", "every second", "transposed"])
def test_views_of_what_forward_changes_are_read_as_they_were(kind: str, engine: str) -> None:
    """Inductor takes the clones away: what is saved is then the buffer itself, seen transposed."""
    plain, x = ReadThroughView(kind).double(), torch.randn(24, 8, dtype=torch.float64)
    model = twin(plain)
    fitted = memfit.fit(model, (x,), budget="1GiB", engine=engine, check=False)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        fitted(x).backward()
        plain(x).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(model.bank, plain.bank, rtol=1e-9, atol=1e-12)
