"""Attention's kernels as a choice: the backward that a fused kernel does from its output, or from queries, keys and values alone.

    fused       q k v  out  logsumexp  gradient  ->  gradients      nothing of the size queries x keys, but the output is kept
    in slices   q k v                  gradient  ->  gradients      a slice of the matrix at a time, the output may be gone

The mathematics is the same, sums are in another order: for a planner that may round otherwise. Dropout inside attention draws
numbers in an order that only its own kernel knows, so attention with dropout has no other form, and neither has a mask that
wants a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.core.graph import Op, Variant
from memfit.kernels.attention_slices import AttentionBackwardInSlices
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
NUM_SLICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Positions:
    """Where a fused backward's arguments are; -1 for a keyword or none."""

    dropout: int
    is_causal: int
    out: int = 4
    mask: int = -1
    wanted: int = -1  # the list that says which gradients are wanted


_FUSED: dict[Any, _Positions] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _Positions(dropout=6, is_causal=7),
    aten._scaled_dot_product_flash_attention_backward.default: _Positions(dropout=10, is_causal=11),
    aten._scaled_dot_product_efficient_attention_backward.default: _Positions(dropout=9, is_causal=11, out=5, mask=4, wanted=10),
    aten._scaled_dot_product_cudnn_attention_backward.default: _Positions(dropout=13, is_causal=14, mask=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a fused backward is given, whichever kernel's it is."""

    gradient: Ref
    query: Ref
    key: Ref
    value: Ref
    out: Ref
    mask: Ref | None
    dropout: float
    is_causal: bool
    scale: float | None
    wants_mask_gradient: bool


def arguments_of(call: OpCall) -> Arguments:
    """Of one of `FUSED_BACKWARDS`."""
    at, args = _FUSED[call.target], call.args
    asked = args[at.wanted] if at.wanted >= 0 else ()
    return Arguments(
        gradient=args[0],
        query=args[1],
        key=args[2],
        value=args[3],
        out=args[at.out],
        mask=args[at.mask] if at.mask >= 0 else call.kwargs.get("attn_mask"),
        dropout=args[at.dropout],
        is_causal=args[at.is_causal] if len(args) > at.is_causal else False,
        scale=call.kwargs.get("scale"),
        wants_mask_gradient=any(asked[3:]),
    )


def offer_attention_slices(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """A backward of fused attention that reads neither its output nor its statistics."""
    a = arguments_of(call)
    q, k = (rewriter.sample(x.tensor) for x in (a.query, a.key))
    unlike = q.dim() != 4 or q.shape[:2] != k.shape[:2] or any(t is None for t in call.outputs[:3])
    if a.dropout != 0 or a.wants_mask_gradient or unlike or not rewriter.is_large(a.query.tensor):
        return
    strides = tuple(() if t is None else tuple(rewriter.sample(t).stride()) for t in call.outputs)
    inner = (a.gradient, a.query, a.key, a.value, a.mask, a.is_causal, a.scale)
    inputs = tuple(dict.fromkeys(x.tensor for x in inner if isinstance(x, Ref)))
    num_slices = min(NUM_SLICES, q.shape[-2])
    target = AttentionBackwardInSlices(num_slices, strides)
    variant = Variant(name=f"math in {num_slices} slices", inputs=inputs, outputs=op.outputs)
    rewriter.add_variant(op.id, variant, replace(call, target=target, args=inner, kwargs={}))


ATTENTION_SLICES = Pass(
    name="attention-slices",
    where="fused attention's backward",
    becomes="slices of the matrix from q, k, v alone",
    saves="the output, the sums",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at(dict.fromkeys(_FUSED, offer_attention_slices)),
)
