"""Gradients put away: none for what the loss does not use, none lost and none added twice when a step fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, fit_tight, same, twin
from torch import nn

import memfit
from memfit.runtime.gradients import GradientSink


class TwoHeads(nn.Module):
    """Two outputs over a shared body; BatchNorm and dropout on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.left, self.right = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x)
        return {"left": self.left(h), "right": self.right(h), "both": (self.left(h).sum(1) + self.right(h).sum(1))}


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(seed))


def _is_absent(module: nn.Module) -> list[bool]:
    return [p.grad is None for p in module.parameters()]


@pytest.mark.parametrize("used", [("left",), ("right",), ("left", "right"), ("both",), ("left", "both")], ids="+".join)
@pytest.mark.parametrize("tight", [False, True])
def test_unused_outputs_give_none(used: tuple[str, ...], tight: bool) -> None:
    plain = TwoHeads()
    fitted: Any = fit_tight(twin(plain), (rows(),), fraction=0.8) if tight else memfit.fit(twin(plain), (rows(),), budget=NO_LIMIT)
    for module in (plain, fitted):
        torch.manual_seed(3)
        out = module(rows())
        sum(out[name].square().sum() for name in used).backward()
    assert _is_absent(fitted) == _is_absent(plain)
    assert any(_is_absent(plain)) == (used in (("left",), ("right",)))
    assert same([p.grad for p in fitted.parameters()], [p.grad for p in plain.parameters()])


def test_adamw_does_not_decay_a_head_that_the_loss_does_not_use() -> None:
    plain = TwoHeads()
    fitted: Any = memfit.fit(twin(plain), (rows(),), budget=NO_LIMIT, planner="keep_all")
    for module in (plain, fitted):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(100):
            module(rows(step))["left"].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(dict(fitted.state_dict()), dict(plain.state_dict()))


def test_an_input_that_the_used_outputs_do_not_read_has_no_gradient() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x).tanh(), self.b(y).tanh()

    plain = Pair()
    fitted: Any = memfit.fit(twin(plain), (rows().requires_grad_(), rows(2).requires_grad_()), budget=NO_LIMIT)
    results = []
    for module in (plain, fitted):
        x, y = rows().requires_grad_(), rows(2).requires_grad_()
        module(x, y)[0].sum().backward()
        asked = torch.autograd.grad(module(x, y)[1].sum(), [x, y, *module.parameters()], allow_unused=True)
        results.append((x.grad, y.grad, [p.grad for p in module.parameters()], list(asked)))
    assert same(results[0], results[1])
    assert results[1][1] is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_be_called_with_nothing_is_refused(register: str) -> None:
    model = TwoHeads()
    fitted: Any = memfit.fit(model, (rows(),), budget=NO_LIMIT, planner="keep_all")
    handle = getattr(model.right[0].weight, register)(lambda gradient: None)
    with pytest.raises(memfit.Unsupported, match=r"right\.0\.weight has a hook"):
        fitted(rows())["left"].sum().backward()
    assert all(_is_absent(model))
    handle.remove()
    fitted(rows())["left"].sum().backward()
    assert not all(_is_absent(model))


def test_alternating_losses_accumulate_as_in_the_plain_model() -> None:
    plain = TwoHeads()
    fitted: Any = memfit.fit(twin(plain), (rows(),), budget=NO_LIMIT, planner="keep_all")
    for module in (plain, fitted):
        torch.manual_seed(3)
        module.seen = []
        for step in range(4):
            module(rows(step))["left" if step % 2 else "right"].sum().backward()
            module.seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    assert same(plain.seen, fitted.seen)


# -- the sink ------------------------------------------------------------------------------------------------------------


class _Short(torch.Tensor):
    """A gradient that cannot be added: the device is out of memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise torch.OutOfMemoryError("injected")


def test_a_gradient_whose_addition_failed_is_put_when_the_step_is_repeated() -> None:
    leaf = nn.Parameter(torch.zeros(3))
    leaf.grad = torch.ones(3)
    sink = GradientSink((leaf,), frozenset())
    with pytest.raises(torch.OutOfMemoryError):
        sink.put(0, torch.ones(3).as_subclass(_Short), False)
    sink.put(0, torch.ones(3), False)
    sink.put(0, torch.ones(3), False)
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))
    assert sink.added == {0}


def test_gradients_are_taken_back_only_where_they_were_made() -> None:
    leaves = (nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3)))
    sink = GradientSink(leaves, frozenset())
    sink.put(0, torch.ones(3), True)
    sink.take_back()
    assert leaves[0].grad is None
    assert leaves[1].grad is None
