"""Another fused kernel for attention: a pair of forms that share the kernel's own sums. The second kernel here is written in Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.passes.variants.test_attention_slices import Attends
from tests.unit.passes.variants.test_choices import gradients_of, plain_gradients
from torch import nn
from torch.nn.functional import cross_entropy

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.costs import uniform_costs
from memfit.core.errors import IllegalSchedule
from memfit.core.simulate import simulate
from memfit.kernels.fused_attention import KERNELS, Kernel, Tensors
from memfit.passes.interface import Context, offer_at
from memfit.passes.regions.regions import gather_regions
from memfit.passes.rewriter import Rewriter
from memfit.passes.run import offer_choices
from memfit.passes.table import PIPELINE, Slot, Use
from memfit.passes.variants import attention_kernels
from memfit.passes.variants.attention_kernels import offer_kernels
from memfit.pipeline.capture import capture
from memfit.pipeline.costs import leave_out_beaten
from memfit.planning import plan
from memfit.planning.model.to_schedule import schedule_from_ops

aten = torch.ops.aten


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    made = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return made.masked_fill(torch.ones(made.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if causal else made


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> Tensors:
    scores = _scores(q, k, causal, scale)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1, keepdim=True)


def _backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> Tensors:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(_scores(q, k, causal, scale) - sums)
    change = weights * (g @ v.transpose(-2, -1) - (g * out).sum(-1, keepdim=True)) * factor
    return change @ k, change.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ g


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernel, and another that keeps its sums in another shape."""
    here = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    other = Kernel(
        name="other", backward_op=None, forward=_forward, backward=_backward, sums_shape=lambda q: (*q.shape[:3], 1), can_use=lambda _: True
    )
    monkeypatch.setattr(attention_kernels, "KERNELS", {here.default: replace(other, name="own", backward_op=back), "other": other})
    monkeypatch.setattr(attention_kernels, "_can_use", lambda rewriter, kernel, arguments: True)


def offered(model: nn.Module) -> tuple[Captured, Call]:
    torch.manual_seed(0)
    call = Call.flatten((torch.randn(3, 11, 16), torch.tensor([0, 4, 1])), {})
    plain = capture(model, call, loss_fn=cross_entropy, num_targets=1)
    rewriter = Rewriter(plain, least_bytes=1)
    for op, made in zip(plain.graph.ops, plain.calls, strict=True):
        if made.target in attention_kernels.KERNELS:
            offer_kernels(rewriter, op, made)
    return rewriter.finish(), call


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize("causal", [False, True])
def test_a_pair_gives_the_gradients(causal: bool) -> None:
    model = Attends(causal=causal, masked=False)
    captured, call = offered(model)
    both = [op.id for op in captured.graph.ops if op.variants]
    assert [op.variants[0].name for op in captured.graph.ops if op.variants] == ["other kernel", "other kernel"]
    schedule = schedule_from_ops(captured.graph, [(op.id, int(op.id in both)) for op in captured.graph.ops])
    simulate(captured.graph, schedule)
    for a, b in zip(gradients_of(captured, schedule, model, call), plain_gradients(model, call, cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("two_kernels")
def test_a_backward_does_not_run_on_another_kernel_s_sums() -> None:
    captured, _ = offered(Attends(causal=False, masked=False))
    forward = next(op.id for op in captured.graph.ops if op.variants)
    with pytest.raises(IllegalSchedule):
        simulate(captured.graph, schedule_from_ops(captured.graph, [(op.id, int(op.id == forward)) for op in captured.graph.ops]))


@pytest.mark.usefixtures("two_kernels")
def test_the_planner_takes_both_of_a_faster_pair() -> None:
    captured, _ = offered(Attends(causal=False, masked=False))
    graph = captured.graph
    costs = replace(
        uniform_costs(graph),
        op_time_ns=tuple(1000 if op.variants else 100 for op in graph.ops),
        variant_time_ns=tuple((10,) if op.variants else () for op in graph.ops),
        variant_workspace_bytes=tuple((0,) if op.variants else () for op in graph.ops),
    )
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
    found = plan(graph, costs, 2 * whole, time_limit_s=5).require_plan()
    chosen = {step.op: step.variant for step in found.schedule.computes if graph.ops[step.op].variants}
    assert list(chosen.values()) == [1, 1]


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize(
    ("forward_ns", "backward_ns", "workspace_bytes", "stays"), [(50, 160, 0, False), (50, 140, 0, True), (150, 150, -1, True)]
)
def test_a_pair_that_is_slower_in_all_is_no_choice(forward_ns: int, backward_ns: int, workspace_bytes: int, stays: bool) -> None:
    """The plain pair takes 100 each; what counts is the sum."""
    captured, _ = offered(Attends(causal=False, masked=False))
    graph = captured.graph
    times = iter((forward_ns, backward_ns))
    costs = replace(
        uniform_costs(graph),
        op_time_ns=tuple(100 for _ in graph.ops),
        workspace_bytes=tuple(1 for _ in graph.ops),
        variant_time_ns=tuple((next(times),) if op.variants else () for op in graph.ops),
        variant_workspace_bytes=tuple((1 + workspace_bytes,) if op.variants else () for op in graph.ops),
    )
    fewer, left = leave_out_beaten(captured, costs)
    assert sum(bool(op.variants) for op in fewer.graph.ops) == (2 if stays else 0)
    assert left.graph_digest == fewer.graph.digest


@pytest.mark.usefixtures("two_kernels")
def test_in_compiled_regions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    here = offer_at({aten._scaled_dot_product_flash_attention_for_cpu.default: attention_kernels.offer_kernels})
    monkeypatch.setitem(PIPELINE, "inductor", (Slot(replace(attention_kernels.ATTENTION_KERNELS, run=here), Use.CHOICE),))
    torch.manual_seed(0)
    model = Attends(causal=True, masked=False)
    call = Call.flatten((torch.randn(3, 11, 16), torch.tensor([0, 4, 1])), {})
    fine = capture(model, call, loss_fn=cross_entropy, num_targets=1, compiler=Inductor())
    captured = gather_regions(offer_choices(fine, "inductor", Context(least_fraction=0.0)), Inductor())
    graph = captured.graph
    both = [op.id for op in graph.ops if any(v.name == "other kernel" for v in op.variants)]
    assert len(both) == 2
    plain = {t for op in graph.ops if op.name.startswith("region") for t in op.outputs}
    optional = [op.id for op in graph.ops if not op.name.startswith("region") and plain.issuperset(op.outputs) and op.outputs]
    schedule = schedule_from_ops(graph, [(op.id, int(op.id in both)) for op in graph.ops if op.id not in optional])
    simulate(graph, schedule)
    for a, b in zip(gradients_of(captured, schedule, model, call), plain_gradients(model, call, cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize(("masked", "dropout"), [(True, 0.0), (False, 0.4)])
def test_masks_and_dropout_are_left_alone(masked: bool, dropout: float) -> None:
    captured, _ = offered(Attends(causal=False, masked=masked, dropout=dropout))
    assert not any(op.variants for op in captured.graph.ops)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU its kernels may be offered")
def test_without_a_gpu_nothing_is_offered() -> None:
    model = Attends(causal=False, masked=False)
    call = Call.flatten((torch.randn(3, 11, 16), torch.tensor([0, 4, 1])), {})
    plain = capture(model, call, loss_fn=cross_entropy, num_targets=1, gpu_attention=True)
    assert any(made.target in KERNELS for made in plain.calls)
    rewriter = Rewriter(plain, least_bytes=1)
    for op, made in zip(plain.graph.ops, plain.calls, strict=True):
        if made.target in KERNELS:
            offer_kernels(rewriter, op, made)
    assert rewriter.finish() is plain
