"""A fitted model looks at what its plan depended on before every step."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.training import NO_LIMIT, same, train
from torch import nn
from torch.nn import functional

import memfit
from memfit.core.recent import MOST


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.drop, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5)
        self.gain, self.calls, self.ready = 1.0, 0, False
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.last(self.drop(self.norm(self.layer(x)))) * self.gain


class Counts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Starts(Net):
    """Sets a flag at its first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.ready = True
            return super().forward(x) * 2
        return super().forward(x)


class Draws(Net):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.draw() < 0.5 else 1)


def batch(rows: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def fit(model: nn.Module, **options: Any) -> Any:
    return memfit.fit(model, (batch()[0],), budget=NO_LIMIT, planner="keep_all", **options)


def test_fit_leaves_the_model_as_it_is() -> None:
    model = Starts()
    before, python, numbers = copy.deepcopy(vars(model)), random.getstate(), torch.get_rng_state()
    fit(model)
    assert (model.ready, model.calls) == (before["ready"], before["calls"])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), Starts().state_dict().values(), strict=True))
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_flag_that_forward_sets_once_is_captured_twice() -> None:
    plain, batches = Starts(), [batch(seed=i) for i in range(3)]
    model = copy.deepcopy(plain)
    assert same(train(fit(model), batches), train(plain, batches))
    assert model.ready


def test_a_change_that_comes_back_finds_its_old_plan() -> None:
    fitted, x = fit(Net()), batch()[0]
    for gain in (1.0, 2.0, 1.0, 2.0, 1.0):
        fitted.gain = gain
        fitted(x).sum().backward()
        fitted.zero_grad()
    assert fitted.report().num_shapes == 2


def test_what_changes_at_every_step_is_refused_by_name() -> None:
    plain = Counts()
    fitted, batches = fit(copy.deepcopy(plain)), [batch(seed=i) for i in range(9)]
    assert same(train(fitted, batches), train(plain, batches))
    with pytest.raises(memfit.Unsupported, match=r"forward changes model\.calls and depends on it"):
        fitted(batch()[0])


def test_a_buffer_that_forward_adds_to_stays_the_same_object() -> None:
    model = Net()
    fitted, count = fit(model), model.count
    fitted(batch()[0]).sum().backward()
    assert model.count is count
    assert count == 1


@pytest.mark.parametrize(("draw", "name"), [(random.random, "python"), (np.random.rand, "numpy")])
def test_random_numbers_that_a_plan_would_freeze_are_refused(draw: Callable[[], float], name: str) -> None:
    before = random.getstate()
    with pytest.raises(memfit.Unsupported, match=f"draws from {name}'s random numbers"):
        fit(Draws(draw))
    assert random.getstate() == before


def test_example_tensors_and_batches_are_not_kept() -> None:
    model, x = Net(), batch()[0]
    fitted = memfit.fit(model, (x,), budget=NO_LIMIT, planner="keep_all")
    other = batch(seed=1)[0]
    fitted(other).sum().backward()
    alive = [weakref.ref(x), weakref.ref(other)]
    del x, other
    gc.collect()
    assert [a() for a in alive] == [None, None]


def test_shapes_used_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = fit(nn.Linear(16, 2))
    monkeypatch.setattr(fitted._memfit._ways, "_most", 2)
    monkeypatch.setattr(fitted._memfit, "_leaves_open", lambda: False)
    for rows in (2, 3, 4):
        fitted(batch(rows)[0]).sum().backward()
    assert fitted.report().num_shapes == 2
    fitted(batch(2)[0]).sum().backward()  # planned again
    assert MOST == 64


def test_sizes_of_an_open_capture_used_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = fit(nn.Linear(16, 2))
    fitted(batch(2)[0]).sum().backward()
    shapes = fitted._memfit._latest.shapes
    monkeypatch.setattr(shapes, "_most", 2)
    for rows in (3, 4, 5, 2):
        fitted(batch(rows)[0]).sum().backward()
        assert fitted._memfit._latest.shapes is shapes
    assert len(shapes) == 2


def test_a_budget_that_is_too_small_is_refused_by_fit() -> None:
    with pytest.raises(memfit.InfeasibleBudget):
        memfit.fit(Net(), (batch()[0],), budget=100)


def test_a_model_that_dynamo_refuses_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart(Net):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layer(x)) * self.gain

    from memfit.runtime import guarded

    asked: list[Any] = []
    capture = guarded.capture_step
    monkeypatch.setattr(guarded, "capture_step", lambda local: asked.append(1) or capture(local))  # type: ignore[func-returns-value]
    plain = Apart()
    fitted, x = fit(copy.deepcopy(plain)), batch()[0]
    for gain in (1.0, 1.0, 2.0, 1.0):
        fitted.gain = plain.gain = gain
        assert torch.equal(fitted(x), plain(x))
    assert len(asked) == 1


def test_transforms_of_functions_are_refused_by_name() -> None:
    fitted, x = fit(Net()), batch()[0]
    with pytest.raises(memfit.Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda t: fitted(t).sum())(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(memfit.Unsupported, match="forward-mode"):
        fitted(torch.autograd.forward_ad.make_dual(x, x))


def test_a_call_that_the_model_refuses_gives_its_own_error() -> None:
    fitted = fit(Net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fitted(torch.randn(3, 7))
    fitted(batch()[0]).sum().backward()


def test_another_loss_weight_is_another_plan() -> None:
    weight = {"of": 1.0}
    x, y = batch()
    model = Net()
    fitted: Any = memfit.fit(
        model,
        (x,),
        budget=NO_LIMIT,
        planner="keep_all",
        loss_fn=lambda o, t: functional.cross_entropy(o, t) * weight["of"],
        example_targets=(y,),
    )
    model.eval()
    first = fitted(x, y)
    weight["of"] = 0.5
    assert torch.equal(fitted(x, y), first * 0.5)
