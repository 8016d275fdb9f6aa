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
from memfit.capture.rewrite import Rewriter
from memfit.core.graph import Op, Variant

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
class _Fused:
    """What a fused backward's arguments mean: `mask` and `is_causal` by position, -1 for a keyword or none."""

    dropout: int
    is_causal: int
    mask: int = -1
    wanted: int = -1  # position of the list that says which gradients are wanted


_FUSED: dict[Any, _Fused] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _Fused(dropout=6, is_causal=7),
    aten._scaled_dot_product_flash_attention_backward.default: _Fused(dropout=10, is_causal=11),
    aten._scaled_dot_product_efficient_attention_backward.default: _Fused(dropout=9, is_causal=11, mask=4, wanted=10),
    aten._scaled_dot_product_cudnn_attention_backward.default: _Fused(dropout=13, is_causal=14, mask=8),
}


def offer_attention_slices(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """A backward of fused attention that reads neither its output nor its statistics."""
    fused, args = _FUSED[call.target], call.args
    gradient, query, key, value = args[:4]
    mask = args[fused.mask] if fused.mask >= 0 else call.kwargs.get("attn_mask")
    asked = args[fused.wanted] if fused.wanted >= 0 else ()
    is_causal = args[fused.is_causal] if len(args) > fused.is_causal else False
    q, k = (rewriter.sample(x.tensor) for x in (query, key))
    unlike = q.dim() != 4 or q.shape[:2] != k.shape[:2] or any(t is None for t in call.outputs[:3])
    if args[fused.dropout] != 0 or any(asked[3:]) or unlike or not rewriter.is_large(query.tensor):
        return
    strides = tuple(() if t is None else tuple(rewriter.sample(t).stride()) for t in call.outputs)
    inner = (gradient, query, key, value, mask, is_causal, call.kwargs.get("scale"), strides)
    inputs = tuple(dict.fromkeys(x.tensor for x in inner if isinstance(x, Ref)))
    num_slices = min(NUM_SLICES, q.shape[-2])
    target: Any = partial(attention_backward_in_slices, num_slices)
    variant = Variant(name=f"math in {num_slices} slices", inputs=inputs, outputs=op.outputs)
    rewriter.add_variant(op.id, variant, replace(call, target=target, args=inner, kwargs={}))


FUSED_BACKWARDS = tuple(_FUSED)
