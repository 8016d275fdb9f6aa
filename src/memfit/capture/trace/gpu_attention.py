"""Attention as a GPU runs it, for captures made without one.

On the CPU `scaled_dot_product_attention` with dropout falls back to explicit matrices, which a GPU never holds. When costs are
wanted for a named GPU, this mode traces the fused kernel that PyTorch would pick there: flash for half precision without a
mask, the memory-efficient one otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_MOST_FLASH_WIDTH = 256


class GpuAttention(TorchFunctionMode):
    """Traces fused attention ops on whatever device the tensors are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _MOST_FLASH_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        result: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    masked: torch.Tensor = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return masked
