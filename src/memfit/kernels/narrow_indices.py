"""Max pool's positions in 16 or 32 bits instead of 64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.implementation import Implementation, Work, count_bytes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NarrowIndices(Implementation):
    dtype: torch.dtype

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        return indices.to(self.dtype)

    def work(self, made: torch.Tensor, indices: torch.Tensor) -> Work:
        return Work.over(indices, made)


@dataclass(frozen=True, slots=True)
class MaxPoolGradientFromNarrow(Implementation):
    """max_pool2d_with_indices_backward, whose last argument is the narrow positions."""

    def __call__(self, gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        *settings, narrow = rest
        result: torch.Tensor = aten.max_pool2d_with_indices_backward.default(gradient, x, *settings, narrow.to(torch.int64))
        return result

    def work(self, made: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> Work:
        """They are widened first, and read as PyTorch's own."""
        return Work(moved_bytes=count_bytes((gradient, x)) + torch.int64.itemsize * rest[-1].numel() + count_bytes(made))
