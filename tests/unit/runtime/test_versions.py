"""What backward reads must be as forward left it: changes in place are refused in autograd's words, as the plain model refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, fit_tight, recomputes, same, twin
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit


class Net(nn.Module):
    """Parameters, a buffer, an activation whose output is saved, and a loss outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) * self.scale
        return torch.sigmoid(self.third(torch.tanh(self.second(h))))


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))


def change_input(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    x.copy_(inputs(2))


def change_weight(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    with torch.no_grad():
        model.second.weight.mul_(2)


def change_buffer(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    model.scale.mul_(2)


def change_output(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    out.detach().mul_(2)


def step_optimizer(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def nothing(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    pass


def replace_gradient(model: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    model.first.weight.grad = None


CHANGES = [change_input, change_weight, change_buffer, change_output, step_optimizer]


def _gradients(model: Any, change: Callable[..., None]) -> Any:
    x = inputs()
    out = model(x)
    change(model, x, out)
    out.sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_between_forward_and_backward_is_refused_as_autograd_does(change: Any, tight: bool) -> None:
    plain = Net()
    model = twin(plain)
    fitted: Any = (
        fit_tight(model, (inputs(),), fraction=0.75) if tight else memfit.fit(model, (inputs(),), budget=NO_LIMIT, planner="keep_all")
    )
    assert recomputes(fitted) == tight
    assert same(_gradients(fitted, nothing), _gradients(plain, nothing))
    model.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(plain, change)
    with pytest.raises(memfit.Unsupported, match=r"modified by an inplace operation: .*version \d+; expected version \d+") as caught:
        _gradients(fitted, change)
    assert isinstance(caught.value, RuntimeError)
    assert all(p.grad is None for p in model.parameters())


def test_the_refusal_names_what_was_changed() -> None:
    fitted = memfit.fit(Net(), (inputs(),), budget=NO_LIMIT, planner="keep_all")
    for change, name in (
        (change_input, "input 0"),
        (change_buffer, "scale"),
        (change_weight, "second.weight"),
        (change_output, "an output"),
    ):
        with pytest.raises(memfit.Unsupported, match=name):
            _gradients(fitted, change)


@pytest.mark.parametrize("change", [nothing, replace_gradient], ids=lambda c: c.__name__)
def test_what_autograd_allows_is_allowed(change: Any) -> None:
    plain = Net()
    fitted = fit_tight(twin(plain), (inputs(),), fraction=0.75)
    for _ in range(3):
        assert same(_gradients(fitted, change), _gradients(plain, change))
        fitted.zero_grad()
        plain.zero_grad()


def test_an_input_of_inference_mode_is_no_false_alarm() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    with torch.inference_mode():
        x = inputs()
    fitted = memfit.fit(Adds(), (inputs(),), budget=NO_LIMIT, planner="keep_all", check=False)
    fitted(x).sum().backward()
    assert torch.equal(fitted.weight.grad, torch.full((6,), 32.0))


class Queue(nn.Module):
    """A buffer that forward computes with and then changes; in eval it only computes with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("queue", torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) @ (self.queue.clone() if self.training else self.queue)
        if self.training:
            self.queue.copy_(torch.roll(self.queue, 1, 1) * 1.5)
        return out


def test_two_forwards_that_change_a_buffer_each_go_back_with_their_own() -> None:
    model = Queue()
    fitted: Any = memfit.fit(twin(model), (inputs(),), budget=NO_LIMIT, planner="keep_all")
    expected = []
    queue = model.queue.clone()
    for x in (inputs(1), inputs(2)):  # the plain model, whose queue is given back before backward
        layer = twin(model.layer)
        (layer(x) @ queue).sum().backward()
        expected.append(layer.weight.grad)
        queue = torch.roll(queue, 1, 1) * 1.5
    first, second = fitted(inputs(1)), fitted(inputs(2))
    second.sum().backward()
    assert torch.allclose(fitted.layer.weight.grad, expected[1])
    fitted.zero_grad()
    first.sum().backward()
    assert torch.allclose(fitted.layer.weight.grad, expected[0])


def test_a_forward_in_training_that_changes_what_an_evaluation_step_reads_is_refused() -> None:
    model = Queue()
    fitted: Any = memfit.fit(model, (inputs(),), budget=NO_LIMIT, planner="keep_all")
    out = fitted.eval()(inputs())
    fitted.train()(inputs(2))
    with pytest.raises(memfit.Unsupported, match="queue"):
        out.sum().backward()


# -- a fitted model inside a checkpoint ----------------------------------------------------------------------------------


def test_inside_a_checkpoint_batch_norm_would_count_twice() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    fitted = memfit.fit(model, (inputs(),), budget=NO_LIMIT, planner="keep_all")
    with pytest.raises(memfit.Unsupported, match=r"torch\.utils\.checkpoint"):
        checkpoint(fitted, inputs().requires_grad_(), use_reentrant=False)
    assert model[1].num_batches_tracked == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_model_without_such_buffers_is_exact(reentrant: bool) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2))
    fitted: Any = memfit.fit(twin(plain), (inputs(),), budget=NO_LIMIT, planner="keep_all")

    def train(model: Any) -> Any:
        torch.manual_seed(3)
        x = inputs().requires_grad_()
        for _ in range(3):
            checkpoint(lambda a: functional.mse_loss(model(a * 2), torch.zeros(32, 2)), x, use_reentrant=reentrant).backward()
        return [x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]

    assert same(train(fitted), train(plain))
