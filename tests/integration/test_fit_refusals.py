"""What memfit cannot do exactly it refuses by name, with the way round; what the model itself refuses stays the model's error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, batch, deep
from torch import nn
from torch.nn import functional

import memfit


def fit(model: nn.Module, *inputs: torch.Tensor) -> Any:
    return memfit.fit(model, inputs, budget=NO_LIMIT, planner="keep_all", check=False)


class Calls(nn.Module):
    """A linear layer and then a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def test_double_backward() -> None:
    x, y = batch()
    fitted = fit(deep(), x)
    loss = functional.cross_entropy(fitted(x), y)
    with pytest.raises(memfit.Unsupported, match="create_graph"):
        torch.autograd.grad(loss, list(fitted.parameters()), create_graph=True)


def test_a_second_backward() -> None:
    x, y = batch()
    fitted = fit(deep(), x)
    loss = functional.cross_entropy(fitted(x), y)
    loss.backward(retain_graph=True)
    gradients = [p.grad.clone() for p in fitted.parameters()]
    with pytest.raises(memfit.Unsupported, match="twice"):
        loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, fitted.parameters(), strict=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * 2 if h.sum() > 0 else h,
        lambda h: h[h > 0].sum(),
        lambda h: h[: int(h.abs().sum().item())],
        lambda h: torch.nonzero(h).float().sum() + h.sum(),
    ],
    ids=["branch", "mask", "item", "nonzero"],
)
def test_what_depends_on_values(function: Any) -> None:
    with pytest.raises(memfit.Unsupported, match=r"depend|values"):
        fit(Calls(function), torch.randn(3, 4))


def test_a_branch_that_only_looks_at_constants_is_fine() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(h.shape[0])
        return h * 2 if bool((positions.diff() == 1).all()) and not bool(torch.rand([]) < 0.0) else h

    fitted = fit(Calls(function), torch.randn(3, 4))
    fitted(torch.randn(3, 4)).sum().backward()


def test_a_tensor_that_is_not_registered() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.weights = [torch.randn(4, requires_grad=True)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.weights[0]

    plain = Hidden()
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    fit(model, x)(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(model.weights[0].grad, plain.weights[0].grad)
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)


def test_a_closure_over_a_tensor() -> None:
    constants = [torch.randn(4)]
    model, x = Calls(lambda h: h * constants[0]), torch.randn(3, 4)
    fitted = fit(model, x)
    for _ in range(2):
        assert torch.equal(fitted(x), model.layer(x) * constants[0])
        constants[0] = torch.randn(4)  # read anew at every step


def test_a_constant_made_inside_the_model_is_taken_along() -> None:
    model = Calls(lambda h: h * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.randn(3, 4)
    fitted = fit(model, x)
    assert torch.equal(fitted(x), model.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(memfit.Unsupported):
        fit(model, torch.randint(0, 10, (3,)))


def test_sparse_inputs() -> None:
    with pytest.raises(memfit.Unsupported):
        fit(Calls(torch.relu), torch.eye(4).to_sparse())


def test_wrong_shapes_give_the_models_own_error() -> None:
    x, _ = batch()
    fitted = fit(deep(), x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fitted(torch.randn(3, 7))
    fitted(x).sum().backward()


def test_wrong_example_inputs() -> None:
    for example in (3, "x", object()):
        with pytest.raises(memfit.MemfitError, match="example_inputs"):
            memfit.fit(deep(), example, budget="1GiB")
    with pytest.raises((RuntimeError, TypeError)):
        memfit.fit(deep(), (), budget="1GiB")


def test_an_input_written_in_place() -> None:
    plain = Calls(torch.relu)
    x = torch.randn(3, 4)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return self.inner(x)

    expected = plain(x * 2)
    given = x.clone()
    fitted = fit(Writes(), x.clone())
    assert torch.equal(fitted(given), expected)
    assert torch.equal(given, x * 2)


def test_a_model_without_anything_to_train() -> None:
    model = deep()
    for p in model.parameters():
        p.requires_grad_(False)
    x, _ = batch()
    fitted = fit(model.eval(), x)
    assert torch.equal(fitted(x), model(x))
    assert not fitted(x).requires_grad
