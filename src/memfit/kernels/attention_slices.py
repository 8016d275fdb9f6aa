"""Attention's backward from queries, keys and values alone: a slice of the matrix of scores at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.kernels.fused_attention import count_attention_flops
from memfit.kernels.implementation import HALF, Implementation, Work
from memfit.kernels.layouts import make_like

aten = torch.ops.aten


_PASS_BYTES = 40
"""Written and read for each score: product, scale, softmax, product, its change in two passes, casts."""

_LAUNCHES = 12  # for each slice


@dataclass(frozen=True, slots=True)
class AttentionBackwardInSlices(Implementation):
    """Gradients of queries, keys and values in these strides, a slice of the queries at a time; sums over slices in at least 32 bits."""

    num_slices: int
    strides: tuple[tuple[int, ...], ...]

    def __call__(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> tuple[torch.Tensor | None, ...]:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        wide = torch.float32 if query.dtype in HALF else query.dtype
        made = [make_like(x, strides=strides) for x, strides in zip((query, key, value), self.strides, strict=False)]
        of_keys, of_values = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (key, value))
        rows = -(-query.shape[-2] // self.num_slices)
        for start in range(0, query.shape[-2], max(rows, 1)):
            q, g = query[..., start : start + rows, :], gradient[..., start : start + rows, :]
            weights = aten._safe_softmax.default(_score(q, key, mask, is_causal, factor, start, wide), -1)
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
        return (*made, *(None for _ in self.strides[3:]))

    def work(self, made: Any, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Work:
        """That of a fused kernel, and what such a one keeps on the chip goes through memory. Held are four matrices of a slice, and the
        sums for keys and values."""
        num_scores = query.numel() // max(query.shape[-1], 1) * key.shape[-2]
        fused = Work.over(
            (gradient, query, key, rest),
            made,
            flops=count_attention_flops(query, key.shape[-2], num_products=5),
            workspace_bytes=-(-16 * num_scores // self.num_slices) + 8 * key.numel(),
        )
        return replace(fused, then=(Work(moved_bytes=_PASS_BYTES * num_scores, launches=_LAUNCHES * self.num_slices),))


def _score(
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
