"""Ops of memfit's own that a traced step may hold. PyTorch runs them as written here; a compiler has better code for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.library.custom_op("memfit::max_pool_gradient", mutates_args=())
def max_pool_gradient(
    change: torch.Tensor, offsets: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], plane: Sequence[int]
) -> torch.Tensor:
    """The gradient of a max pool's input, a `plane` in its last two dimensions. This is what a compiler has better code for."""
    rows, columns = (
        torch.arange(size, device=change.device) * step - pad for size, step, pad in zip(change.shape[-2:], stride, padding, strict=True)
    )
    within = offsets.long()
    places = (rows[:, None] + within // kernel[1]) * plane[1] + columns + within % kernel[1]
    flat = change.new_zeros(*change.shape[:-2], plane[0] * plane[1])
    flat.scatter_add_(-1, places.flatten(-2), change.flatten(-2))
    made: torch.Tensor = flat.unflatten(-1, list(plane))
    return made.contiguous(memory_format=_format_of(change))


@max_pool_gradient.register_fake
def _(
    change: torch.Tensor, offsets: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], plane: Sequence[int]
) -> torch.Tensor:
    sizes = (*change.shape[:-2], *plane)
    return torch.empty(sizes, dtype=change.dtype, device=change.device, memory_format=_format_of(change))


def _format_of(change: torch.Tensor) -> torch.memory_format:
    planar = change.is_contiguous() or change.dim() != 4 or not change.is_contiguous(memory_format=torch.channels_last)
    return torch.contiguous_format if planar else torch.channels_last


POOL_GRADIENT = torch.ops.memfit.max_pool_gradient.default
