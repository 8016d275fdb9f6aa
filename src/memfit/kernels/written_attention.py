"""Attention that a model writes out over batches of matrices, by a fused kernel: the matrix of scores never exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.fused_attention import count_attention_flops
from memfit.kernels.implementation import Implementation, Work
from memfit.kernels.layouts import lay_out

aten = torch.ops.aten
ALIGNED = 16  # elements of a row of the mask, and of a head's width over 2, that CUDA's kernel wants


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`signs` say what each mask is: 0 for one that is added, 1 for one that is True where nothing may be seen, -1 for the opposite.
    `strides` are those expected of the gradients.

    Every matrix is given to the kernel as an example with one head, so that `out` lies in memory as a product would; or, where each
    example has a mask of its own, in `heads` heads.
    """

    scale: float
    heads: int
    signs: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def shape_sums(query: torch.Tensor, heads: int) -> tuple[int, int, int]:
    """The shape of the logarithms of sums that a fused kernel keeps; CUDA's are padded."""
    rows = query.shape[1]
    return query.shape[0] // heads, heads, -(-rows // 32) * 32 if query.device.type == "cuda" else rows


@dataclass(frozen=True, slots=True)
class WrittenAttention(Implementation):
    """(out, logsumexp) of queries, transposed keys, values and masks."""

    settings: Settings

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = _split_heads(self.settings, query, keys.transpose(1, 2), value)
        mask, scale = _join_masks(self.settings, masks, q, k), self.settings.scale
        if q.is_cuda:
            made = aten._scaled_dot_product_efficient_attention.default(q, k, v, mask, True, 0.0, False, scale=scale)
        else:
            made = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        return made[0].reshape(query.shape), made[1]

    def work(self, made: Any, query: torch.Tensor, keys: torch.Tensor, *rest: torch.Tensor) -> Work:
        flops = count_attention_flops(query, keys.shape[-1], num_products=2)
        return Work.over((query, keys, rest), made, flops=flops)


@dataclass(frozen=True, slots=True)
class WrittenAttentionBackward(Implementation):
    """Gradients of queries, transposed keys and values."""

    settings: Settings

    def __call__(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        *masks: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        settings = self.settings
        q, k, v, g, o = _split_heads(settings, query, keys.transpose(1, 2), value, gradient, out)
        mask = _join_masks(settings, masks, q, k)
        if q.is_cuda:
            unused = torch.empty((), dtype=torch.int64, device=q.device)  # would say which random numbers dropout drew
            backward: Any = aten._scaled_dot_product_efficient_attention_backward.default
            made = backward(g, q, k, v, mask, o, sums, unused, unused, 0.0, [True, True, True, False], False, scale=settings.scale)
        else:
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            made = backward(g, q, k, v, o, sums, 0.0, False, attn_mask=mask, scale=settings.scale)
        found = (made[0].reshape(query.shape), made[1].reshape(*value.shape[:2], -1).transpose(1, 2), made[2].reshape(value.shape))
        return tuple(lay_out(t, strides) for t, strides in zip(found, settings.strides, strict=True))

    def work(self, made: Any, gradient: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, *rest: torch.Tensor) -> Work:
        flops = count_attention_flops(query, keys.shape[-1], num_products=5)
        return Work.over((gradient, query, keys, rest), made, flops=flops)


def _split_heads(settings: Settings, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple((t if t.stride(-1) == 1 else t.contiguous()).unflatten(0, (-1, settings.heads)) for t in matrices)


def _join_masks(settings: Settings, masks: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """All masks as one to add, for all heads of an example. Rows lie as far apart as CUDA's kernel wants them."""
    if not masks:
        return None
    rows, columns = q.shape[-2], k.shape[-2]
    whole = (*q.shape[:2], rows, columns)
    if settings.signs == (0,) and masks[0].dtype == q.dtype and (not q.is_cuda or (columns % ALIGNED == 0 and masks[0].stride(-1) == 1)):
        return masks[0].reshape(-1, 1, *masks[0].shape[-2:]).expand(whole)
    wide = -(-columns // ALIGNED) * ALIGNED
    num = q.shape[0] if settings.heads > 1 else 1
    total = torch.zeros((num, 1, rows, wide), dtype=q.dtype, device=q.device)[..., :columns]
    for mask, sign in zip(masks, settings.signs, strict=True):
        matrix = mask.reshape(-1, 1, *mask.shape[-2:])
        if sign == 0:
            total.add_(matrix)
        else:
            total.masked_fill_(matrix if sign > 0 else ~matrix, float("-inf"))
    return total.expand(whole)
