"""Attention's backward from queries, keys and values alone: the gradients of the fused kernel, without its output."""

from __future__ import annotations

import pytest
import torch
from tests.unit.passes.variants.test_choices import gradients_of, plain_gradients
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.core.simulate import simulate
from memfit.kernels.attention_slices import AttentionBackwardInSlices
from memfit.passes.interface import Context
from memfit.passes.run import offer_choices
from memfit.pipeline.capture import capture
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.profile.roofline import roofline

_WIDTH = 16
_OPTIONAL = ("memfit.pack_bits", "memfit.narrow_indices", "memfit.norm_apply")


class Attends(nn.Module):
    def __init__(self, *, causal: bool, masked: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.masked, self.dropout = causal, masked, dropout
        self.inward, self.outward = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1))
        mask = torch.linspace(-1, 1, x.shape[1]).expand(1, 1, x.shape[1], -1) if self.masked else None
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, dropout_p=self.dropout)
        return self.outward(attended.transpose(1, 2).flatten(2).mean(1))


def _captured(model: nn.Module, *, gpu: bool = False) -> tuple[Captured, Call]:
    torch.manual_seed(0)
    call = Call.flatten((torch.randn(3, 11, _WIDTH), torch.tensor([0, 4, 1])), {})
    plain = capture(model, call, loss_fn=cross_entropy, num_targets=1, gpu_attention=gpu)
    return offer_choices(plain, "eager", Context(least_fraction=0.0)), call


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_gradients_are_those_of_the_fused_kernel(causal: bool, masked: bool) -> None:
    torch.manual_seed(1)
    model = Attends(causal=causal, masked=masked)
    captured, call = _captured(model)
    graph = captured.graph
    op = next(op for op in graph.ops if "attention" in op.name and "backward" in op.name)
    number = next(k + 1 for k, v in enumerate(op.variants) if v.name == "math in 8 slices")
    fused = next(o for o in graph.ops if "attention" in o.name and o is not op)
    assert not set(fused.outputs) & set(op.variants[number - 1].inputs), "neither output nor statistics are read"
    sequence = [(o.id, number if o is op else 0) for o in graph.ops if o.name not in _OPTIONAL]
    schedule = schedule_from_ops(graph, sequence)
    simulate(graph, schedule)
    ours = gradients_of(captured, schedule, model, call)
    for a, b in zip(ours, plain_gradients(model, call, cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_attention_with_dropout_has_no_other_form() -> None:
    captured, _ = _captured(Attends(causal=True, masked=False, dropout=0.5), gpu=True)
    attention = [op for op in captured.graph.ops if "attention" in op.name]
    assert len(attention) == 2
    assert not any("slices" in v.name for op in attention for v in op.variants)


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, True)])
def test_the_kernels_of_a_gpu_have_it_too_and_it_costs_more(causal: bool, masked: bool) -> None:
    captured, _ = _captured(Attends(causal=causal, masked=masked), gpu=True)
    costs = roofline(captured, "h200")
    op = next(op for op in captured.graph.ops if "attention" in op.name and "backward" in op.name)
    number = next(k + 1 for k, v in enumerate(op.variants) if v.name == "math in 8 slices")
    assert costs.time_ns(op.id, number) > costs.time_ns(op.id)
    assert costs.workspace(op.id, number) > 0


@pytest.mark.parametrize("num_slices", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_slices_of_any_number_and_type(num_slices: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    q, k, v, gradient = (torch.randn(2, 3, 9, 4, dtype=dtype) for _ in range(4))
    allowed = torch.rand(2, 1, 9, 9) > 0.3
    allowed[0, 0, 4] = False  # a query that may look at nothing
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = (leaves[0] @ leaves[1].transpose(-2, -1) / 2).masked_fill(~allowed, float("-inf"))
    (torch.ops.aten._safe_softmax.default(scores, -1) @ leaves[2]).backward(gradient.double())
    strides = tuple(tuple(x.transpose(1, 2).contiguous().transpose(1, 2).stride()) for x in (q, k, v))
    made = AttentionBackwardInSlices(num_slices, (*strides, ()))(gradient, q, k, v, allowed, False, 0.5)
    assert made[3] is None
    for ours, leaf, stride in zip(made[:3], leaves, strides, strict=True):
        assert ours is not None
        assert ours.stride() == stride
        assert leaf.grad is not None
        torch.testing.assert_close(
            ours.double(),
            leaf.grad.nan_to_num(),
            rtol=1e-6 if dtype is torch.float64 else 5e-2,
            atol=1e-9 if dtype is torch.float64 else 5e-2,
        )
