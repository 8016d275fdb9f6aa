"""Convolutions over slices of the batch: the workspace of one slice at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.kernels.implementation import Implementation, Work, work_of
from memfit.kernels.layouts import find_memory_format

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ConvolutionInSlices(Implementation):
    num_slices: int

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        first = aten.convolution.default(x[:1], weight, *rest)
        shape, layout = (x.shape[0], *first.shape[1:]), find_memory_format(first)
        output = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=layout)
        del first
        for part, place in zip(x.chunk(self.num_slices), output.chunk(self.num_slices), strict=True):
            place.copy_(aten.convolution.default(part, weight, *rest))
        return output

    def work(self, made: torch.Tensor, *args: Any) -> Work:
        return replace(work_of(aten.convolution.default, made, args, {}), launches=self.num_slices)


@dataclass(frozen=True, slots=True)
class ConvolutionBackwardInSlices(Implementation):
    """Gradients of the input slice by slice; those of weight and bias added up over slices."""

    num_slices: int

    def __call__(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        *settings, mask = rest
        num_slices = self.num_slices
        input_gradient = torch.empty_like(x) if mask[0] else None
        total: list[torch.Tensor | None] = [None, None]
        places = input_gradient.chunk(num_slices) if input_gradient is not None else (None,) * num_slices
        for part, slice_x, place in zip(gradient.chunk(num_slices), x.chunk(num_slices), places, strict=False):
            made = aten.convolution_backward.default(part, slice_x, weight, *settings, mask)
            if place is not None:
                place.copy_(made[0])
            for k in (0, 1):
                if mask[k + 1]:
                    total[k] = made[k + 1] if total[k] is None else total[k].add_(made[k + 1])  # type: ignore[union-attr]
            del made
        return input_gradient, total[0], total[1]

    def work(self, made: tuple[Any, ...], *args: Any) -> Work:
        return replace(work_of(aten.convolution_backward.default, made, args, {}), launches=self.num_slices)
