"""The captured graph: storages not tensors, kinds, origins, and what surrounds the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training import Tied, batch, deep
from torch import nn
from torch.nn import functional

import memfit
from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call
from memfit.capture.lower.optimizer_bytes import SCALARS_BYTES, optimizer_bytes
from memfit.core.graph import Kind
from memfit.pipeline.capture import capture


def captured(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Captured:
    return capture(model, Call.flatten(inputs, {}), **options)


def total(step: Captured, kind: Kind) -> int:
    return sum(s.size_bytes for s in step.graph.storages if s.kind is kind)


def test_kinds_add_up_to_the_models_bytes() -> None:
    model = deep()
    x, _ = batch()
    step = captured(model, x)
    parameters = sum(p.nbytes for p in model.parameters())
    assert total(step, Kind.PARAMETER) == parameters
    assert total(step, Kind.BUFFER) == sum(b.nbytes for b in model.buffers())
    assert total(step, Kind.INPUT) == x.nbytes
    assert total(step, Kind.GRADIENT) >= parameters
    assert step.has_backward


def test_tied_weights_are_one_storage_with_one_gradient() -> None:
    model = Tied()
    step = captured(model, torch.randint(0, 11, (2, 5)))
    assert total(step, Kind.PARAMETER) == sum(p.nbytes for p in model.parameters())
    assert sum(c.role is Role.ACCUMULATE for c in step.calls) == len(list(model.parameters()))


def test_two_buffers_over_one_storage_are_one_storage() -> None:
    model = nn.Linear(4, 4)
    base = torch.zeros(8)
    model.register_buffer("a", base[:4])
    model.register_buffer("b", base[4:])
    assert total(captured(model, torch.randn(2, 4)), Kind.BUFFER) == base.nbytes


def test_ops_know_their_module_and_line() -> None:
    step = captured(deep(), batch()[0])
    products = [op for op in step.graph.ops if "mm" in op.name]
    assert all(op.where for op in products)
    assert any(op.where.startswith("2.0") for op in products)


def test_frozen_parameters_make_no_gradient() -> None:
    model = deep()
    model[0].requires_grad_(False)
    step = captured(model, batch()[0])
    trained = sum(p.requires_grad for p in model.parameters())
    assert sum(c.role is Role.ACCUMULATE for c in step.calls) == trained


def test_inference_has_no_backward() -> None:
    step = captured(deep().eval(), batch()[0], training=False)
    assert not step.has_backward
    assert step.boundary == len(step.calls)


def test_dropout_between_recurrent_layers_is_there() -> None:
    """torch's own decomposition loses it."""
    step = captured(nn.GRU(3, 3, num_layers=3, dropout=0.5), torch.randn(2, 1, 3), loss_fn=lambda o: o[0].sum())
    assert sum(op.seeded for op in step.graph.ops) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_random_numbers_only_with_dropout(dropout: float) -> None:
    """Its kernels are marked as if they always did, and what draws cannot be repeated in a CUDA graph."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    x = torch.randn(2, 4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    step = captured(Attention(), x, loss_fn=lambda o: o.sum(), gpu_attention=True)
    kernels = [op for op in step.graph.ops if "scaled_dot_product" in op.name and "backward" not in op.name]
    assert kernels
    assert all(torch.Tag.nondeterministic_seeded in step.calls[op.id].target.tags for op in kernels)  # type: ignore[union-attr]
    assert all(op.seeded == (dropout > 0) for op in kernels)


def test_an_optimizer_that_has_its_state_already_takes_as_much() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    fresh = optimizer_bytes(optimizer)
    model(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    assert optimizer_bytes(optimizer) == fresh
    assert fresh.state_bytes >= 3 * 4 * (30 * 20 + 20)


def test_a_loss_that_keeps_its_elements() -> None:
    """The scalar of mse_loss lies in a storage as large as its input."""
    x = torch.randn(6, 4)
    step = captured(nn.Linear(4, 4), x, torch.randn(6, 4), loss_fn=functional.mse_loss, num_targets=1)
    loss = next(op for op in step.graph.ops if "mse_loss.default" in op.name)
    real = torch.ops.aten.mse_loss.default(x, x)
    assert step.graph.size_of(loss.outputs[0]) == real.untyped_storage().nbytes() == 96


def test_accumulating_steps_hold_the_earlier_gradients() -> None:
    model = deep()
    fresh, again = captured(model, batch()[0]), captured(model, batch()[0], accumulates=True)
    earlier = {again.graph.storage_of(t) for t in again.graph.sources} - set(range(len(fresh.graph.sources)))
    assert any(again.graph.storages[s].kind is Kind.GRADIENT for s in earlier)


def test_reserve_and_optimizer_are_in_the_step() -> None:
    model = deep()
    step = captured(model, batch()[0], optimizer=torch.optim.AdamW(model.parameters()), reserve_bytes=12345)
    assert 12345 in dict(step.fixed_workspace).values()
    assert step.calls[-1].role is Role.OPTIMIZER
    assert total(step, Kind.OPTIMIZER) > 2 * sum(p.nbytes for p in model.parameters())


def test_a_model_on_the_meta_device_takes_no_memory() -> None:
    """Three hundred gibibytes of weights, and all we hold is the graph."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**17, 2**17) for _ in range(5)])
        x = torch.empty(8, 2**17)
    step = captured(model, x, optimizer=torch.optim.Adam(model.parameters()))
    assert total(step, Kind.PARAMETER) > 300 * 2**30
    assert total(step, Kind.OPTIMIZER) > 600 * 2**30
    assert step.has_backward


def test_the_digest_is_of_the_step_not_of_the_values() -> None:
    x, _ = batch()
    assert captured(deep(), x).graph.digest == captured(deep(), x + 1).graph.digest
    assert captured(deep(), x).graph.digest != captured(deep(), x[:8]).graph.digest


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, centered=True),
    ],
    ids=["sgd", "momentum", "adamw", "foreach", "amsgrad", "rmsprop"],
)
def test_optimizer_bytes_are_those_of_a_real_step(make: Any) -> None:
    from memfit.torch_private.allocations import peaks_of

    parameters = [nn.Parameter(torch.randn(n)) for n in (50, 300, 7)]
    optimizer = make(parameters)
    found = optimizer_bytes(optimizer)
    assert not optimizer.state
    for p in parameters:
        p.grad = torch.ones_like(p)
    state, _ = peaks_of(optimizer.step, torch.device("cpu"))
    left, peak = peaks_of(optimizer.step, torch.device("cpu"))
    assert found.state_bytes == state
    assert 0 <= found.temporary_bytes - peak <= SCALARS_BYTES
    assert left == 0


class Clamping(nn.Module):
    """Overwrites a parameter behind autograd's back, then uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.clamp_(-0.1, 0.1)
        return self.last(self.first(x)).sum()


class Renormalizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(4, 4, max_norm=0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).sum()


@pytest.mark.parametrize(("model", "x"), [(Clamping(), torch.randn(3, 4)), (Renormalizing(), torch.tensor([0, 1]))])
def test_a_parameter_that_forward_overwrites_is_refused_by_name(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(memfit.Unsupported, match=r"first\.weight is overwritten by forward"):
        memfit.fit(model, (x,), budget="1MiB")


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def test_a_refusal_names_the_line() -> None:
    with pytest.raises(memfit.Unsupported, match=r"values at test_capture\.py:\d+: `if x\.sum\(\) > 0:`"):
        captured(Deciding(), torch.ones(3, requires_grad=True))
