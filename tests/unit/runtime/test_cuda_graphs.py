"""Replayed steps: when a step is taken from its recording, when it is called instead, and that both train as the plain model does.

CUDA graphs need a GPU (`tests/gpu/test_replay_gpu.py`); here a recorder stands for them that does the work again, into the tensors of the first time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from tests.training import NO_LIMIT, batch, deep, fit_tight, recomputes
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import memfit
from memfit.core.errors import Unsupported
from memfit.runtime import cuda_graphs as recorded

_T = TypeVar("_T")
_FIRST = 4  # steps that are called before one is recorded


class Again:
    """Records on the CPU. Recording does nothing yet, as with CUDA graphs: what it did to buffers and generators is undone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0

    def record(self, work: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
        buffers, state = [b.clone() for b in self.model.buffers()], torch.get_rng_state()
        made = work()
        for buffer, old in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(old)
        torch.set_rng_state(state)

        def replay() -> None:
            self.count += 1
            with torch.no_grad():
                for old, new in zip(tree_leaves(made), tree_leaves(work()), strict=True):
                    old.copy_(new)

        return replay, made


def replaying(model: nn.Module, **options: Any) -> tuple[Any, Again]:
    x, y = batch()
    fitted = fit_tight(model, (x,), loss_fn=functional.cross_entropy, example_targets=(y,), **options)
    recorder = Again(model)
    fitted._memfit.recorder = lambda ready: recorder
    return fitted, recorder


def steps(model: Any, count: int, *, loss_fn: Any = None, lr: float = 0.1) -> list[torch.Tensor]:
    """Losses, each kept to the end, and last the parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for seed in range(count):
        x, y = batch(seed=seed)
        optimizer.zero_grad()
        loss = model(x, y) if loss_fn is None else loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_with_replays_is_the_plain_training(dropout: float) -> None:
    plain, model = deep(dropout=dropout), deep(dropout=dropout)
    fitted, recorder = replaying(model)
    assert recomputes(fitted)
    torch.manual_seed(3)
    ours = steps(fitted, 9)
    torch.manual_seed(3)
    assert equal(ours, steps(plain, 9, loss_fn=functional.cross_entropy))
    assert recorder.count == 2 * (9 - _FIRST)
    assert "replayed from CUDA graphs" in fitted.report().notes


def test_what_the_caller_holds_is_never_written_over() -> None:
    model = deep(dropout=0.0)
    fitted, recorder = replaying(model)
    steps(fitted, 6)
    x, y = batch(seed=1)
    fitted.zero_grad()
    fitted(x, y).backward()
    kept = next(model.parameters()).grad
    assert kept is not None
    value, replays = kept.clone(), recorder.count
    for p in model.parameters():
        p.grad = None
    x, y = batch(seed=2)
    fitted(x, y).backward()
    assert recorder.count == replays, "the gradient of the step before is held: this one must be called"
    assert torch.equal(kept, value)
    del kept
    fitted.zero_grad()
    fitted(x, y).backward()
    assert recorder.count == replays + 2


def test_a_forward_before_the_last_ones_backward_is_called() -> None:
    plain, model = deep(dropout=0.0), deep(dropout=0.0)
    fitted, recorder = replaying(model)
    for found, loss_fn in ((fitted, None), (plain, functional.cross_entropy)):
        steps(found, 6, loss_fn=loss_fn)
    replays = recorder.count
    (x1, y1), (x2, y2) = batch(seed=1), batch(seed=2)
    fitted.zero_grad()
    first, second = fitted(x1, y1), fitted(x2, y2)
    (first + second).backward()
    plain.zero_grad()
    (functional.cross_entropy(plain(x1), y1) + functional.cross_entropy(plain(x2), y2)).backward()
    assert recorder.count == replays + 2
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)


def test_a_forward_without_backward_does_not_stop_replays() -> None:
    fitted, recorder = replaying(deep(dropout=0.0))
    steps(fitted, 6)
    fitted.zero_grad()
    replays = recorder.count
    x, y = batch()
    fitted(x, y)
    fitted(x, y).backward()
    assert recorder.count == replays + 3


def test_backward_twice_is_refused() -> None:
    fitted, _ = replaying(deep(dropout=0.0))
    steps(fitted, 6)
    fitted.zero_grad()
    loss = fitted(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(Unsupported, match="twice"):
        loss.backward()


def test_parameters_that_move_are_recorded_anew_and_not_for_ever() -> None:
    plain, model = deep(dropout=0.0), deep(dropout=0.0)
    fitted, recorder = replaying(model)
    made: list[recorded.Recording] = []
    fitted._memfit.recorder = lambda ready: made.append(ready) or recorder  # type: ignore[func-returns-value]
    x, y = batch()
    for _ in range(12):
        for m in (model, plain):
            m.zero_grad()
        fitted(x, y).backward()
        functional.cross_entropy(plain(x), y).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
            ours.data, theirs.data = ours.data - 0.1 * ours.grad, theirs.data - 0.1 * theirs.grad  # type: ignore[operator]
    assert len(made) == 4


def test_accumulating_steps_are_called() -> None:
    plain, model = deep(dropout=0.0), deep(dropout=0.0)
    fitted, recorder = replaying(model)
    for found, loss_fn in ((fitted, None), (plain, functional.cross_entropy)):
        steps(found, 6, loss_fn=loss_fn)
        found.zero_grad()
        for seed in range(3):
            x, y = batch(seed=seed)
            (found(x, y) if loss_fn is None else loss_fn(found(x), y)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert recorder.count


def test_large_outputs_and_gradients_of_inputs() -> None:
    """An output that is too large to be copied is called around while it is held; an input's gradient comes back through autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 600))
    plain = copy.deepcopy(model)
    x = torch.randn(512, 64)
    fitted: Any = memfit.fit(model, (x.clone().requires_grad_(),), budget=NO_LIMIT)
    recorder = Again(model)
    fitted._memfit.recorder = lambda ready: recorder
    outputs = []
    for number in range(8):
        ours, theirs = (x + number).requires_grad_(), (x + number).requires_grad_()
        for m in (model, plain):
            m.zero_grad()
        out, expected = fitted(ours), plain(theirs)
        out.sin().sum().backward()
        expected.sin().sum().backward()
        assert torch.equal(out, expected)
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        outputs.append((out.detach(), expected.detach()))
    assert all(torch.equal(a, b) for a, b in outputs)
    assert recorder.count == 2  # the first replay's output is held


def test_what_cannot_be_recorded_is_called_and_the_report_says_why() -> None:
    class Refuses:
        def record(self, work: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
            raise RuntimeError("operation not permitted when stream is capturing")

    plain, model = deep(dropout=0.0), deep(dropout=0.0)
    fitted, _ = replaying(model)
    fitted._memfit.recorder = lambda ready: Refuses()
    assert equal(steps(fitted, 8), steps(plain, 8, loss_fn=functional.cross_entropy))
    assert [n for n in fitted.report().notes if "not permitted" in n] == ["not replayed: operation not permitted when stream is capturing"]


def test_replay_needs_a_gpu_and_says_so() -> None:
    x, y = batch()
    with pytest.raises(Unsupported, match="replay=True needs a model on a CUDA device"):
        memfit.fit(deep(), (x,), budget="1GiB", loss_fn=functional.cross_entropy, example_targets=(y,), replay=True)
