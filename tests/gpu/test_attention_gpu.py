"""Attention by other kernels on a CUDA device: written out or fused by one kernel, done by another, as exact and inside the budget."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import memfit
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.core.costs import uniform_costs
from memfit.core.simulate import simulate
from memfit.kernels.fused_attention import KERNELS, AttentionBackwardBy, AttentionBy, Kernel
from memfit.passes.interface import Context
from memfit.passes.run import offer_choices
from memfit.pipeline.capture import capture
from memfit.pipeline.costs import measure_costs
from memfit.planning import plan
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_OPTIONAL = ("memfit.pack_bits", "memfit.narrow_indices", "memfit.norm_apply")
_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class Attends(nn.Module):
    """Attention in one of several ways of writing it; lengths and widths that kernels must pad among them."""

    def __init__(self, how: str, width: int = 128) -> None:
        super().__init__()
        self.how = how
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1))
        return self.outward(self.attended(q, k, v).transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("sdpa"):
            return scaled_dot_product_attention(q, k, v, is_causal=self.how == "sdpa causal")
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.how == "causal":
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
        return torch.softmax(scores, -1) @ v


class Residual(nn.Module):
    """A layer that keeps the sequence: what an attention gives, added to what it was given."""

    def __init__(self, inner: Attends) -> None:
        super().__init__()
        self.inner = inner
        inner.outward = nn.Linear(inner.outward.in_features, inner.outward.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.inner.inward(x).chunk(3, -1))
        return x + self.inner.outward(self.inner.attended(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def setting(how: str, dtype: torch.dtype, length: int = 197) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Attends(how).cuda().to(dtype), torch.randn(8, length, 128, device="cuda", dtype=dtype), torch.randint(0, 5, (8,), device="cuda")


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Scaled, as losses are for 16-bit floats: gradients of a mean over 197 places would be among their smallest numbers."""
    return 1024 * cross_entropy(logits.float(), y)


def exact_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    wide = copy.deepcopy(model).double()
    (1024 * cross_entropy(wide(x.double()), y)).backward()
    return [p.grad for p in wide.parameters() if p.grad is not None]


def gradients_of(captured: Captured, schedule: Any, model: nn.Module, call: Call) -> list[torch.Tensor]:
    simulate(captured.graph, schedule)
    chosen = plan(captured.graph, planner="keep_all").require_plan()
    costs, program = uniform_costs(captured.graph), generate(captured, schedule)
    ready = Ready(captured=captured, costs=costs, plan=chosen, program=program, keep_all_peak_bytes=0, base_time_ns=0)
    run(Session(ready, (*model.parameters(), *model.buffers(), *call.tensors), trial=False, replan=lambda _: None)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def is_close(found: torch.Tensor, exact: torch.Tensor, error: float) -> bool:
    return float((found.double() - exact).abs().max()) <= error * float(exact.abs().max())


@pytest.mark.parametrize("dtype", list(_ERRORS), ids=str)
@pytest.mark.parametrize("how", ["plain", "causal"])
@pytest.mark.parametrize("length", [197, 256])
def test_what_is_written_out_can_be_fused(how: str, dtype: torch.dtype, length: int) -> None:
    model, x, y = setting(how, dtype, length)
    call = Call.flatten((x, y), {})
    captured = offer_choices(capture(model, call, loss_fn=loss_of, num_targets=1), "eager", Context(least_fraction=0.0))
    graph = captured.graph
    made = {t for op in graph.ops if op.name.startswith("memfit.fused") for t in op.outputs}
    assert made, "the pattern is found"
    ops = [op for op in graph.ops if op.name not in _OPTIONAL and (op.name.startswith("memfit.fused") or not made.intersection(op.outputs))]
    wanted, needed = set(graph.results), []
    for op in reversed(ops):
        if wanted.intersection(op.outputs) or not op.replayable:
            wanted.update(op.inputs)
            needed.append((op.id, 0))
    ours = gradients_of(captured, schedule_from_ops(graph, needed[::-1]), model, call)
    for a, b in zip(ours, exact_gradients(model, x, y), strict=True):
        assert is_close(a, b, _ERRORS[dtype])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [197, 256])
def test_every_kernel_and_its_backward(kernel: Kernel, causal: bool, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-2, -1) / 8
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -math.inf)
    exact = torch.softmax(scores, -1) @ wide[2]
    g = torch.randn_like(q)
    exact.backward(g.double())
    out, sums = AttentionBy(kernel, q.stride())(q, k, v, causal, None)
    assert out.stride() == q.stride()
    assert is_close(out, exact.detach(), 2e-2)
    made = AttentionBackwardBy(kernel, (q.stride(),) * 3)(g, q, k, v, out, sums, causal, None)
    for found, of in zip(made, wide, strict=True):
        assert of.grad is not None
        assert is_close(found, of.grad, 3e-2)


@pytest.mark.parametrize("how", ["sdpa", "sdpa causal"])
def test_a_step_by_another_kernel(how: str) -> None:
    model, x, y = setting(how, torch.bfloat16)
    call = Call.flatten((x, y), {})
    captured = offer_choices(capture(model, call, loss_fn=loss_of, num_targets=1), "eager", Context(least_fraction=0.0))
    graph = captured.graph
    named = sorted({v.name for op in graph.ops for v in op.variants if v.name.endswith("kernel")})
    assert named, "another kernel is offered"
    costs = measure_costs(captured)
    total = sum(s.size_bytes for s in graph.storages)
    for name in named:
        forms = {op.id: 1 + [v.name for v in op.variants].index(name) for op in graph.ops if name in [v.name for v in op.variants]}
        assert len(forms) == 2
        assert all(costs.workspace(op, v) < total for op, v in forms.items()), "it could be measured"
        model.zero_grad()
        sequence = [(op.id, forms.get(op.id, 0)) for op in graph.ops if op.name not in _OPTIONAL]
        ours = gradients_of(captured, schedule_from_ops(graph, sequence), model, call)
        for a, b in zip(ours, exact_gradients(model, x, y), strict=True):
            assert is_close(a, b, _ERRORS[torch.bfloat16])


@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.parametrize("how", ["causal", "sdpa"])
def test_a_fitted_model(engine: str, how: str) -> None:
    """Large enough that cuBLAS's 32 MiB and the context matter little. (Not run on a GPU since its budget was changed.)"""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(Attends(how)) for _ in range(3)), Attends(how)).cuda().to(torch.bfloat16)
    x, y = torch.randn(64, 512, 128, device="cuda", dtype=torch.bfloat16), torch.randint(0, 5, (64,), device="cuda")
    expected = exact_gradients(model, x, y)
    task: dict[str, Any] = {"loss_fn": loss_of, "example_targets": (y,), "engine": engine, "time_limit_s": 3}
    whole = memfit.fit(copy.deepcopy(model), (x,), budget="100GiB", **task)
    whole(x, y).backward()
    budget = int(0.8 * whole.report().measured_peak_bytes) + 64 * 2**20
    del whole
    fitted = memfit.fit(model, (x,), budget=budget, allow=("recompute", "variants", "rounding"), **task)
    for _ in range(2):
        model.zero_grad()
        fitted(x, y).backward()
    assert fitted.report().measured_peak_bytes <= budget
    for a, b in zip([p.grad for p in model.parameters() if p.grad is not None], expected, strict=True):
        assert is_close(a, b, _ERRORS[torch.bfloat16])
