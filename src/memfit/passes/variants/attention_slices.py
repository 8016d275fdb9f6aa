"""Attention's kernels as a choice: the backward that a fused kernel does from its output, or from queries, keys and values alone.

    fused       q k v  out  logsumexp  gradient  ->  gradients      nothing of the size queries x keys, but the output is kept
    in slices   q k v                  gradient  ->  gradients      a slice of the matrix at a time, the output may be gone

The mathematics is the same, sums are in another order: for a planner that may round otherwise. Dropout inside attention draws
numbers in an order that only its own kernel knows, so attention with dropout has no other form, and neither has a mask that
wants a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.core.graph import Op, Variant
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
NUM_SLICES = 8
_HALF = (torch.float16, torch.bfloat16)


def attention_backward_in_slices(
    num_slices: int,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    strides: tuple[tuple[int, ...], ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of queries, keys and values, a slice of the queries at a time; sums over slices in at least 32 bits."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float32 if query.dtype in _HALF else query.dtype
    made = [torch.empty_strided(x.shape, s, dtype=x.dtype, device=x.device) for x, s in zip((query, key, value), strides, strict=False)]
    of_keys, of_values = torch.zeros(key.shape, dtype=wide, device=key.device), torch.zeros(value.shape, dtype=wide, device=key.device)
    rows = -(-query.shape[-2] // num_slices)
    for start in range(0, query.shape[-2], max(rows, 1)):
        q, g = query[..., start : start + rows, :], gradient[..., start : start + rows, :]
        weights = aten._safe_softmax.default(_scores(q, key, mask, is_causal, factor, start, wide), -1)
        of_values += torch.matmul(weights.to(q.dtype).transpose(-2, -1), g)
        change = torch.matmul(g, value.transpose(-2, -1)).to(wide)
        change.sub_((change * weights).sum(-1, keepdim=True)).mul_(weights)
        del weights
        narrow = change.to(q.dtype)
        del change
        made[0][..., start : start + rows, :] = torch.matmul(narrow, key).mul_(factor)
        of_keys += torch.matmul(narrow.transpose(-2, -1), q)
    made[1].copy_(of_keys.mul_(factor))
    made[2].copy_(of_values)
    return (*made, *(None for _ in strides[3:]))


def _scores(
    q: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, factor: float, start: int, wide: torch.dtype
) -> torch.Tensor:
    scores = torch.matmul(q, key.transpose(-2, -1)).to(wide).mul_(factor)
    if is_causal:
        rows = torch.arange(start, start + q.shape[-2], device=q.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(key.shape[-2], device=q.device) > rows, float("-inf"))
    if mask is not None:
        part = mask[..., start : start + q.shape[-2], :] if mask.shape[-2] > 1 else mask
        scores = scores.masked_fill_(~part, float("-inf")) if part.dtype is torch.bool else scores.add_(part)
    return scores


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
    inner = (a.gradient, a.query, a.key, a.value, a.mask, a.is_causal, a.scale, strides)
    inputs = tuple(dict.fromkeys(x.tensor for x in inner if isinstance(x, Ref)))
    num_slices = min(NUM_SLICES, q.shape[-2])
    target: Any = partial(attention_backward_in_slices, num_slices)
    variant = Variant(name=f"math in {num_slices} slices", inputs=inputs, outputs=op.outputs)
    rewriter.add_variant(op.id, variant, replace(call, target=target, args=inner, kwargs={}))


FUSED_BACKWARDS = tuple(_FUSED)
