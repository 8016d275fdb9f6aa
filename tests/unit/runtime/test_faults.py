"""Faults at every op of a step: what is left is that of a step never started or completed, and training goes on exactly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.training import fit_tight, recomputes, same, twin
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Normed(nn.Module):
    """Linear, BatchNorm, dropout: random numbers and running statistics, both recomputed when memory is short."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3)) for _ in range(2)]
        self.body = nn.Sequential(*parts, nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Queued(nn.Module):
    """A buffer that forward reads and then changes, noise, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(torch.tanh(self.layer(x)))) + 0.1 * torch.rand_like(x)
        loss = (h @ self.queue.clone()).square().mean()
        self.queue.copy_(torch.roll(self.queue, 1, 0) * 0.9)
        return loss


class Attending(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(-1, 4, 8)).square().mean()


MODELS = [Normed, Queued, Attending]


def rows(seed: int) -> torch.Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))


class Fault(TorchDispatchMode):
    """Raises in the place of op number `at`, once; counts ops."""

    def __init__(self, at: int | None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.at:
            assert self.error is not None
            raise self.error
        return func(*args, **(kwargs or {}))


@dataclass
class State:
    """All that a step changes."""

    gradients: Any
    tensors: Any
    random: torch.Tensor

    @classmethod
    def of(cls, model: nn.Module) -> State:
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        return cls(gradients, {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state())

    def put_into(self, model: nn.Module) -> None:
        for p, g in zip(model.parameters(), self.gradients, strict=True):
            p.grad = None if g is None else g.clone()
        with torch.no_grad():
            for k, v in model.state_dict().items():
                v.copy_(self.tensors[k])
        torch.set_rng_state(self.random)

    def equals(self, other: State) -> bool:
        return same([self.gradients, self.tensors, self.random], [other.gradients, other.tensors, other.random])


class Loop:
    """A fitted model past its trial, at a point to which it can be put back."""

    def __init__(self, kind: Callable[[], nn.Module], accumulates: bool, steps_before: int = 1) -> None:
        self.plain = kind()
        self.model = twin(self.plain)
        self.fitted: Any = fit_tight(self.model, (rows(0),), fraction=0.75 if kind is not Queued else 0.9)
        torch.manual_seed(4)
        for step in range(steps_before):
            self.fitted(rows(step)).backward()
        if not accumulates:
            self.model.zero_grad()
        else:
            self.fitted(rows(7)).backward()  # plans the accumulating step too
        self.start = State.of(self.model)

    def step(self, mode: Any = None) -> None:
        with mode or Fault(None):
            self.fitted(rows(3)).backward()

    def whole(self) -> State:
        self.step()
        return State.of(self.model)


ERRORS = [lambda: ValueError("injected"), lambda: KeyboardInterrupt(), lambda: torch.OutOfMemoryError("injected")]
NAMES = ["exception", "interrupt", "out of memory"]


@pytest.mark.parametrize("make", ERRORS[:2], ids=NAMES[:2])
@pytest.mark.parametrize("accumulates", [False, True], ids=["fresh", "accumulating"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_fault_at_any_op_leaves_the_step_undone_or_done(kind: Any, accumulates: bool, make: Any) -> None:
    loop = Loop(kind, accumulates)
    counter = Fault(None)
    loop.step(counter)
    done = State.of(loop.model)
    forward_done = _forward_only(loop)
    assert counter.count > 20
    for at in range(counter.count):
        loop.start.put_into(loop.model)
        error = make()
        with pytest.raises(type(error)):
            loop.step(Fault(at, error))
        left = State.of(loop.model)
        assert left.equals(loop.start) or left.equals(done) or left.equals(forward_done), f"op {at} of {counter.count}"
        if left.equals(loop.start):
            assert same(loop.whole().gradients, done.gradients), f"the step after a fault at op {at}"


def _forward_only(loop: Loop) -> State:
    """Forward is a step of its own: buffers and random numbers are those after it, gradients those before."""
    loop.start.put_into(loop.model)
    loss = loop.fitted(rows(3))
    state = State.of(loop.model)
    del loss
    return state


@pytest.mark.parametrize("accumulates", [False, True], ids=["fresh", "accumulating"])
@pytest.mark.parametrize("kind", MODELS[:2])
def test_out_of_memory_at_any_op_is_planned_again_and_exact(kind: Any, accumulates: bool) -> None:
    """Each op once; a shape gives up after three, so a plan is found anew for every fault."""
    loop = Loop(kind, accumulates)
    counter = Fault(None)
    loop.step(counter)
    done = State.of(loop.model)
    for at in range(0, counter.count, 3):
        loop.start.put_into(loop.model)
        shape = loop.fitted._memfit.latest
        ready, shape.oom_replans = shape.ready, 0
        try:
            loop.step(Fault(at, torch.OutOfMemoryError("injected")))
            assert State.of(loop.model).equals(done), f"op {at}"
        except torch.OutOfMemoryError:
            left = State.of(loop.model)
            assert left.equals(done) or same(left.gradients, loop.start.gradients), f"op {at}"
        shape.ready, shape.tighter_by, shape.steps = ready, 0, 5


@pytest.mark.parametrize("kind", MODELS)
def test_a_fault_in_the_first_step_leaves_it_undone_or_done(kind: Any) -> None:
    """The trial: with what is kept to compare it with the plain model, which is run inside its backward."""
    counter = Fault(None)
    base = Loop(kind, accumulates=False, steps_before=0)
    assert recomputes(base.fitted)
    shape = base.fitted._memfit.latest
    shape.steps = 0
    base.step(counter)
    done = State.of(base.model)
    forward_done = _forward_only(base)
    for at in range(0, counter.count, 2):
        base.start.put_into(base.model)
        shape.steps = 0
        try:
            base.step(Fault(at, KeyboardInterrupt()))
            left = State.of(base.model)  # the check of the first step may not stop training
            assert left.equals(done), f"op {at}"
        except KeyboardInterrupt:
            left = State.of(base.model)
            assert left.equals(base.start) or left.equals(done) or left.equals(forward_done), f"op {at} of {counter.count}"


def test_a_failed_step_holds_no_memory() -> None:
    loop = Loop(Normed, accumulates=False)
    counter = Fault(None)
    loop.step(counter)
    loop.start.put_into(loop.model)

    def held() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor)

    before = held()
    for at in (3, counter.count // 2, counter.count - 3):
        loop.start.put_into(loop.model)
        with pytest.raises(ValueError, match="injected"):
            loop.step(Fault(at, ValueError("injected")))
        loop.start.put_into(loop.model)
        assert held() <= before


def test_training_goes_on_after_faults_as_if_there_had_been_none() -> None:
    """A fault in backward comes after a whole forward, which has counted a batch and drawn its numbers: the plain model makes that too."""
    plain = Normed()
    fitted: Any = fit_tight(twin(plain), (rows(0),), fraction=0.75)
    went_forward: dict[int, bool] = {}
    for module in (fitted, plain):
        torch.manual_seed(4)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(12):
            if module is fitted:
                before = torch.get_rng_state()
                with pytest.raises(ValueError, match="injected"), Fault(step * 5 + 1, ValueError("injected")):
                    fitted(rows(step)).backward()
                went_forward[step] = not torch.equal(before, torch.get_rng_state())
            elif went_forward[step]:
                plain(rows(step))
            module(rows(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(went_forward.values()) == {True, False}
    assert same(dict(plain.state_dict()), dict(fitted.state_dict()))
