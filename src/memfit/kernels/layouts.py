"""How tensors lie in memory: strides without gaps, memory formats, and tensors made to measure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def find_memory_format(x: torch.Tensor) -> torch.memory_format:
    """Contiguous, or channels last for images and volumes that lie so and not contiguously."""
    last = CHANNELS_LAST.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def is_dense(x: torch.Tensor) -> bool:
    """Whether every element lies once between the first and the last, in some order."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return extent == x.numel()


def order_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for a shape, dimensions in the order of `strides`."""
    made = [1] * len(shape)
    extent = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        made[d] = extent
        extent *= max(shape[d], 1)
    return tuple(made)


def make_like(
    sample: torch.Tensor,
    *,
    strides: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An empty tensor of a sample's shape, strides, type and device, or with others of these."""
    return torch.empty_strided(
        sample.shape, sample.stride() if strides is None else strides, dtype=dtype or sample.dtype, device=device or sample.device
    )


def lies_in(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether elements lie as far apart as these strides say; those of dimensions of size 1 say nothing."""
    return all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


def lay_out(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same values in these strides: `x` itself where it lies so, else a copy."""
    return x if lies_in(x, strides) else make_like(x, strides=strides).copy_(x)
