"""Gradients of a convolution whose input is a concatenation, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.implementation import Implementation, Work, count_flops
from memfit.kernels.layouts import lay_out, make_like, order_strides

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOfPart(Implementation):
    """A convolution's gradient for channels [start, stop) of its input, in this shape and these strides.

    It is a transposed convolution, which asks for no input (`convolution_backward` does, and works in that one's layout).
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def __call__(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        own = _copy_dense(weight[:, self.start : self.stop], self.strides)
        geometry = (self.stride, self.padding, self.dilation)
        sizes = zip(self.shape[2:], gradient.shape[2:], own.shape[2:], *geometry, strict=True)
        left = [size - ((short - 1) * step - 2 * pad + spread * (window - 1) + 1) for size, short, window, step, pad, spread in sizes]
        made: torch.Tensor = aten.convolution.default(gradient, own, None, *geometry, True, left, 1)
        return lay_out(made, self.strides)

    def work(self, made: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> Work:
        flops = 2 * gradient.numel() * (self.stop - self.start) * weight[0, 0].numel()
        return Work.over((gradient, weight), made, flops=float(flops))


@dataclass(frozen=True, slots=True)
class ParameterGradientsFromParts(Implementation):
    """(None, gradient of the weight in these strides, gradient of the bias) of a convolution whose input is the parts side by side."""

    strides: tuple[int, ...] | None

    def __call__(
        self, gradient: torch.Tensor, parts: Sequence[torch.Tensor], weight: torch.Tensor, bias_sizes: Any, *rest: Any
    ) -> tuple[torch.Tensor | None, ...]:
        *geometry, (_, has_weight, has_bias) = rest
        whole = None if self.strides is None else make_like(weight, strides=self.strides)
        bias: torch.Tensor | None = None
        start = 0
        for part in parts:
            stop = start + part.shape[1]
            mask = [False, has_weight, has_bias and start == 0]
            own = _copy_dense(weight[:, start:stop], part.stride())
            made = aten.convolution_backward.default(gradient, part, own, bias_sizes, *geometry, mask)
            if whole is not None:
                whole[:, start:stop].copy_(made[1])
            bias = made[2] if mask[2] else bias
            start = stop
            del made
        return None, whole, bias

    def work(self, made: Any, gradient: torch.Tensor, parts: Sequence[torch.Tensor], weight: torch.Tensor, *rest: Any) -> Work:
        """That of the gradients from the whole, whose bytes are those of its parts."""
        batch, _, *plane = parts[0].shape
        whole = torch.Size((batch, sum(part.shape[1] for part in parts), *plane))
        flops = count_flops(aten.convolution_backward.default, made, gradient, whole, weight, *rest)
        return Work.over((gradient, parts, weight), made, flops=flops)


def _copy_dense(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A copy without gaps, dimensions in the order of these strides."""
    return make_like(x, strides=order_strides(x.shape, order)).copy_(x)
