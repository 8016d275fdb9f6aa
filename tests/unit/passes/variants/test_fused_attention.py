"""Attention that a model writes out itself, done by a fused kernel: found where it is, the same gradients, smaller budgets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.passes.variants.test_choices import gradients_of, plain_gradients
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

import memfit
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.core.costs import uniform_costs
from memfit.core.simulate import simulate
from memfit.passes.interface import Context
from memfit.passes.run import offer_choices
from memfit.pipeline.capture import capture
from memfit.planning import plan
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.profile.roofline import roofline

_WIDTH, _HEADS, _LENGTH = 16, 2, 11
_OPTIONAL = ("memfit.pack_bits", "memfit.narrow_indices", "memfit.norm_apply")
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def hidden(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)


def slope(q: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, q.shape[-2], dtype=q.dtype).expand(1, 1, q.shape[-2], -1)


def padding(q: torch.Tensor) -> torch.Tensor:
    """Other keys hidden in each example, for all heads."""
    length = torch.arange(q.shape[0]).view(-1, 1, 1, 1)
    return torch.where(torch.arange(q.shape[-2]) < q.shape[-2] - length, 0.0, -1e3).to(q.dtype).expand(-1, -1, q.shape[-2], -1)


def with_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * 0.3, -1), v)


def in_three_dimensions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    return (torch.softmax(torch.bmm(flat[0], flat[1].transpose(1, 2)) * 0.2, 2) @ flat[2]).unflatten(0, q.shape[:2])


WRITTEN: dict[str, Attend] = {
    "plain": lambda q, k, v: torch.softmax(scores(q, k), -1) @ v,
    "unscaled": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), 3) @ v,
    "scaled twice": lambda q, k, v: torch.softmax((q @ k.transpose(-2, -1) * 0.5) / 2.0, -1) @ v,
    "scaled before": lambda q, k, v: torch.softmax((q * 0.25) @ k.transpose(-2, -1), -1) @ v,
    "causal": lambda q, k, v: torch.softmax(scores(q, k).masked_fill(hidden(q), -math.inf), -1) @ v,
    "where": lambda q, k, v: torch.softmax(torch.where(~hidden(q), scores(q, k), -math.inf), -1) @ v,
    "bias": lambda q, k, v: torch.softmax(scores(q, k) + slope(q), -1) @ v,
    "bias and causal": lambda q, k, v: torch.softmax((slope(q) + scores(q, k)).masked_fill(hidden(q), -math.inf), -1) @ v,
    "a mask for each example": lambda q, k, v: torch.softmax(scores(q, k) + padding(q), -1) @ v,
    "hidden in each example": lambda q, k, v: torch.softmax(scores(q, k).masked_fill(padding(q) < 0, -math.inf), -1) @ v,
    "causal in each example": lambda q, k, v: torch.softmax(scores(q, k) + padding(q) + slope(q), -1) @ v,
    "dropout of nothing": lambda q, k, v: dropout(torch.softmax(scores(q, k), -1), 0.0) @ v,
    "einsum": with_einsum,
    "three dimensions": in_three_dimensions,
}
LEFT_ALONE: dict[str, Attend] = {
    "dropout": lambda q, k, v: dropout(torch.softmax(scores(q, k), -1), 0.3) @ v,
    "dropout inside sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.3),
    "a finite number where hidden": lambda q, k, v: torch.softmax(scores(q, k).masked_fill(hidden(q), -1e4), -1) @ v,
    "scaled after the bias": lambda q, k, v: torch.softmax((scores(q, k) + slope(q)) * 0.5, -1) @ v,
    "over queries": lambda q, k, v: torch.softmax(scores(q, k), -2) @ v,
    "more than the scores": lambda q, k, v: torch.softmax(torch.tanh(scores(q, k)), -1) @ v,
    "weights used again": lambda q, k, v: (w := torch.softmax(scores(q, k), -1)) @ v + w.sum(-1, keepdim=True).square(),
    "weights transposed": lambda q, k, v: torch.softmax(scores(q, k), -1).transpose(-2, -1) @ v,
    "a mask for each head": lambda q, k, v: torch.softmax(scores(q, k) + slope(q).repeat(1, _HEADS, 1, 1), -1) @ v,
}


class Attends(nn.Module):
    def __init__(self, attend: Attend, width: int = _WIDTH, heads: int = _HEADS) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1))
        return self.outward(self.attend(q, k, v).transpose(1, 2).flatten(2).mean(1))


def offered(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Captured, Call]:
    torch.manual_seed(0)
    call = Call.flatten((torch.randn(3, _LENGTH, _WIDTH, dtype=dtype), torch.tensor([0, 4, 1])), {})
    plain = capture(model, call, loss_fn=cross_entropy, num_targets=1)
    return offer_choices(plain, "eager", Context(least_fraction=0.0)), call


def fused_ops(captured: Captured) -> list[str]:
    return [op.name for op in captured.graph.ops if op.name.startswith("memfit.fused_attention")]


def fused_schedule(captured: Captured) -> Any:
    """Everything needed for the results when the fused ops make what they can make."""
    graph = captured.graph
    made = {t for op in graph.ops if op.name.startswith("memfit.fused") for t in op.outputs}
    ops = [op for op in graph.ops if op.name not in _OPTIONAL and (op.name.startswith("memfit.fused") or not made.intersection(op.outputs))]
    wanted, needed = set(graph.results), []
    for op in reversed(ops):
        if wanted.intersection(op.outputs) or not op.replayable:
            wanted.update(op.inputs)
            needed.append((op.id, 0))
    return schedule_from_ops(graph, needed[::-1])


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in WRITTEN), ("plain", torch.float32), ("hidden in each example", torch.float32)]
)
def test_the_fused_kernel_gives_the_gradients_of_what_is_written(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Attends(WRITTEN[name]).to(dtype)
    captured, call = offered(model, dtype)
    assert fused_ops(captured) == ["memfit.fused_attention", "memfit.fused_attention_backward"]
    schedule = fused_schedule(captured)
    simulate(captured.graph, schedule)
    names = {captured.graph.ops[step.op].name for step in schedule.computes}
    assert "memfit.fused_attention_backward" in names
    assert not any("softmax" in n and "log_softmax" not in n for n in names), "no score is made"
    exact = dtype is torch.float64
    for a, b in zip(gradients_of(captured, schedule, model, call), plain_gradients(model, call, cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10 if exact else 1e-4, atol=1e-12 if exact else 1e-6)


def test_in_half_precision_the_gradients_are_as_good_as_those_written() -> None:
    torch.manual_seed(1)
    model = Attends(WRITTEN["causal"])
    with torch.autocast("cpu", torch.bfloat16):
        captured, call = offered(model)
        assert fused_ops(captured)
        ours = gradients_of(captured, fused_schedule(captured), model, call)
        plain = plain_gradients(model, call, cross_entropy)
    exact = plain_gradients(model, call, cross_entropy)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert float((a - c).abs().max()) < 2 * float((b - c).abs().max()) + 1e-2 * float(c.abs().max())


@pytest.mark.parametrize("name", list(LEFT_ALONE))
def test_what_is_not_plainly_attention_is_left_alone(name: str) -> None:
    captured, _ = offered(Attends(LEFT_ALONE[name]))
    assert fused_ops(captured) == []


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


def test_a_gradient_of_somebody_else_s_making_is_left_alone() -> None:
    captured, _ = offered(Attends(lambda q, k, v: torch.softmax(ScaledGradient.apply(scores(q, k)), -1) @ v))
    assert fused_ops(captured) == []


class Block(nn.Module):
    """A transformer layer that writes its attention out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), Attends(WRITTEN["causal"], width, 4)
        self.attend.outward = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.attend
        q, k, v = (part.unflatten(-1, (a.heads, -1)).transpose(1, 2) for part in a.inward(self.norm(x)).chunk(3, -1))
        x = x + a.outward(a.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32), nn.Flatten(1), nn.Linear(256 * 32, 5))
    return model, torch.randn(2, 256, 32), torch.tensor([1, 3])


def test_a_transformer_trains_where_one_matrix_of_scores_would_not_fit() -> None:
    model, x, y = transformer()
    matrix_bytes = 2 * 4 * 256 * 256 * 4  # examples, heads, queries, keys
    held = sum(4 * p.numel() for p in model.parameters())
    budget = 2 * held + int(0.8 * matrix_bytes)  # parameters, gradients, and less than one such matrix for everything else
    task: dict[str, Any] = {"budget": budget, "loss_fn": cross_entropy, "example_targets": (y,), "time_limit_s": 10}
    with pytest.raises(memfit.InfeasibleBudget):
        memfit.fit(copy.deepcopy(model), (x,), allow=("recompute",), **task)
    twin = copy.deepcopy(model)
    cross_entropy(twin(x), y).backward()
    fitted = memfit.fit(model, (x,), **task)
    for _ in range(2):
        model.zero_grad()
        fitted(x, y).backward()
    assert fitted.report().measured_peak_bytes <= budget
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_fused_way_counts_its_arithmetic() -> None:
    model, x, y = transformer()
    plain = capture(model, Call.flatten((x, y), {}), loss_fn=cross_entropy, num_targets=1)
    captured = offer_choices(plain, "eager", Context(least_fraction=0.0))
    costs = roofline(captured, "cpu")
    of = {op.name: costs.op_time_ns[op.id] for op in captured.graph.ops if op.name.startswith("memfit.fused_attention")}
    product = max(costs.op_time_ns[op.id] for op in captured.graph.ops if op.name == "aten.bmm.default")
    assert of["memfit.fused_attention_backward"] > of["memfit.fused_attention"] > product


def test_a_lower_floor_with_the_same_step() -> None:
    model, x, y = transformer()
    plain = capture(model, Call.flatten((x, y), {}), loss_fn=cross_entropy, num_targets=1)
    captured = offer_choices(plain, "eager", Context())
    floors = [plan(c.graph, uniform_costs(c.graph), 0, time_limit_s=1).lower_bound_bytes for c in (plain, captured)]
    assert floors[1] < 0.7 * floors[0]
