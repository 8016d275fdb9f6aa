"""Attention written out by a model, done by a fused kernel: the matrix of scores never exists.

    written out   bmm ─ scale ─ mask ─ softmax ─ bmm          keeps queries x keys numbers per head, or makes them again
    fused         one kernel ──> out, logsumexp               keeps a number per query; its own backward reads them

Both ways stay in the step, as two optional ops: a forward that makes the same `out` and the sums its backward needs, and that
backward, which makes the same three gradients. The planner picks, and what nobody reads is not run. The mathematics is the same,
sums are in another order. Attention that drops out is left alone, because nobody else could draw the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.capture.lower.storages import allocated_bytes
from memfit.core.graph import Op
from memfit.passes.rewriter import Rewriter
from memfit.passes.variants.attention_kernels import laid_out
from memfit.passes.variants.attention_pattern import Attention, find_attention

aten = torch.ops.aten
_ALIGNED = 16  # elements of a row of the mask, and of a head's width over 2, that CUDA's kernel wants
_MOST_MATRICES = 65_535  # of a batch, in one launch on CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`signs` say what each mask is, as in `Attention`; `strides` are those expected of the gradients.

    Every matrix is given to the kernel as an example with one head, so that `out` lies in memory as a product would; or, where each
    example has a mask of its own, in `heads` heads.
    """

    scale: float
    heads: int
    signs: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def offer_fused_attention(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """For a softmax inside attention: the fused forward and backward beside it."""
    found = find_attention(rewriter, op) if rewriter.is_large(op.outputs[0]) else None
    if found is None or not _is_supported(rewriter, found):
        return
    query = rewriter.sample(found.query)
    heads = query.shape[0] // found.examples if any(_num_matrices(rewriter, found, mask) > 1 for mask, _ in found.masks) else 1
    sums = torch.empty(sums_shape(query, heads), dtype=_wide(query.dtype), device="meta")
    saved = rewriter.new_tensor(allocated_bytes(sums, rewriter.granularity), sums, "logsumexp")
    gradients = (found.of_query, found.of_keys, found.of_value)
    strides = tuple(tuple(rewriter.sample(t).stride()) for t in gradients)
    settings = Settings(scale=found.scale, heads=heads, signs=tuple(sign for _, sign in found.masks), strides=strides)
    given = (found.query, found.keys, found.value)
    masks = tuple(mask for mask, _ in found.masks)
    for after, name, target, inputs, outputs in (
        (found.forward, "memfit.fused_attention", fused_attention, (*given, *masks), (found.out, saved)),
        (
            found.backward,
            "memfit.fused_attention_backward",
            fused_attention_backward,
            (found.gradient, *given, found.out, saved, *masks),
            gradients,
        ),
    ):
        made = OpCall(target=partial(target, settings), args=tuple(map(Ref, inputs)), outputs=outputs, unpack=True)
        rewriter.add_after(after, name, tuple(dict.fromkeys(inputs)), outputs, made)


def _is_supported(rewriter: Rewriter, found: Attention) -> bool:
    query, keys, value = (rewriter.sample(t) for t in (found.query, found.keys, found.value))
    out = rewriter.sample(found.out)
    alike = query.shape[2] == value.shape[2] and query.dtype == value.dtype == keys.dtype == out.dtype
    small = all(_num_matrices(rewriter, found, mask) for mask, _ in found.masks)
    if query.device.type == "cuda":
        half = query.dtype in (torch.float16, torch.bfloat16)
        known = (half or query.dtype is torch.float32) and query.shape[2] % (_ALIGNED // 2) == 0 and query.shape[0] <= _MOST_MATRICES
    else:
        known = query.device.type == "cpu"
    return alike and small and known and out.is_contiguous()


def _num_matrices(rewriter: Rewriter, found: Attention, mask: int) -> int:
    """1 for a mask that all examples share, their number for one each; 0 for heads that differ, which no form takes."""
    shape, scores = rewriter.sample(mask).shape, (rewriter.sample(found.query).shape[1], rewriter.sample(found.keys).shape[2])
    num = math.prod(shape[:-2])
    first = len(shape) == 4 or (len(shape) == 3 and found.examples == rewriter.sample(found.query).shape[0])
    known = num == 1 or (first and num == shape[0] == found.examples)
    broadcast = len(shape) >= 2 and all(a in (1, b) for a, b in zip(shape[-2:], scores, strict=True))
    return num if known and broadcast else 0


def sums_shape(query: torch.Tensor, heads: int) -> tuple[int, int, int]:
    """Of the logarithms of sums that a fused kernel keeps; CUDA's are padded."""
    rows = query.shape[1]
    return query.shape[0] // heads, heads, -(-rows // 32) * 32 if query.device.type == "cuda" else rows


def fused_attention(
    settings: Settings, query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logsumexp)."""
    q, k, v = _heads(settings, query, keys.transpose(1, 2), value)
    mask = _one_mask(settings, masks, q, k)
    if q.is_cuda:
        made = aten._scaled_dot_product_efficient_attention.default(q, k, v, mask, True, 0.0, False, scale=settings.scale)
    else:
        made = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, False, attn_mask=mask, scale=settings.scale)
    return made[0].reshape(query.shape), made[1]


def fused_attention_backward(
    settings: Settings,
    gradient: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    *masks: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, transposed keys and values."""
    q, k, v, g, o = _heads(settings, query, keys.transpose(1, 2), value, gradient, out)
    mask = _one_mask(settings, masks, q, k)
    if q.is_cuda:
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # would say which random numbers dropout drew
        backward: Any = aten._scaled_dot_product_efficient_attention_backward.default
        made = backward(g, q, k, v, mask, o, sums, unused, unused, 0.0, [True, True, True, False], False, scale=settings.scale)
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        made = backward(g, q, k, v, o, sums, 0.0, False, attn_mask=mask, scale=settings.scale)
    found = (made[0].reshape(query.shape), made[1].reshape(*value.shape[:2], -1).transpose(1, 2), made[2].reshape(value.shape))
    return tuple(laid_out(t, strides) for t, strides in zip(found, settings.strides, strict=True))


def _heads(settings: Settings, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple((t if t.stride(-1) == 1 else t.contiguous()).unflatten(0, (-1, settings.heads)) for t in matrices)


def _one_mask(settings: Settings, masks: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """All masks as one to add, for all heads of an example. Rows lie as far apart as CUDA's kernel wants them."""
    if not masks:
        return None
    rows, columns = q.shape[-2], k.shape[-2]
    whole = (*q.shape[:2], rows, columns)
    if settings.signs == (0,) and masks[0].dtype == q.dtype and (not q.is_cuda or (columns % _ALIGNED == 0 and masks[0].stride(-1) == 1)):
        return masks[0].reshape(-1, 1, *masks[0].shape[-2:]).expand(whole)
    wide = -(-columns // _ALIGNED) * _ALIGNED
    num = q.shape[0] if settings.heads > 1 else 1
    total = torch.zeros((num, 1, rows, wide), dtype=q.dtype, device=q.device)[..., :columns]
    for mask, sign in zip(masks, settings.signs, strict=True):
        matrix = mask.reshape(-1, 1, *mask.shape[-2:])
        if sign == 0:
            total.add_(matrix)
        else:
            total.masked_fill_(matrix if sign > 0 else ~matrix, float("-inf"))
    return total.expand(whole)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
