"""Convolutions and their gradients by algorithms of cuDNN that were chosen; by PyTorch's own where cuDNN refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.core.units import format_bytes
from memfit.kernels.cudnn import Algorithm, Convolution, CudnnError, Direction, library
from memfit.kernels.implementation import Implementation, Work, work_of
from memfit.kernels.layouts import CHANNELS_LAST

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm for each pass that an op makes, and the strides its outputs are expected to have."""

    convolution: Convolution
    algorithms: tuple[tuple[Direction, Algorithm], ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def workspace_bytes(self) -> int:
        return max(a.workspace_bytes for _, a in self.algorithms)

    @property
    def name(self) -> str:
        numbers = "+".join(str(a.number) for _, a in self.algorithms)
        return f"algorithm {numbers} in {format_bytes(self.workspace_bytes)}" + (" without a copy" if self.convolution.has_strides else "")


@dataclass(frozen=True, slots=True)
class ConvolutionBy(Implementation):
    """aten.convolution with the chosen algorithm."""

    choice: Choice

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
        choice = self.choice
        ((which, algorithm),) = choice.algorithms
        shape = choice.convolution.input if which is Direction.DATA else choice.convolution.output
        inputs = (weight, x) if which is Direction.DATA else (x, weight)
        try:
            result = _run(choice, which, algorithm, inputs, shape, choice.strides[0])
        except CudnnError:
            made: torch.Tensor = aten.convolution.default(x, weight, bias, *settings)
            return made
        return result if bias is None else result.add_(bias.view(1, -1, *(1,) * (x.dim() - 2)))

    def work(self, made: torch.Tensor, *args: Any) -> Work:
        return replace(work_of(aten.convolution.default, made, args, {}), workspace_bytes=self.choice.workspace_bytes)


@dataclass(frozen=True, slots=True)
class ConvolutionBackwardBy(Implementation):
    """aten.convolution_backward with the chosen algorithms."""

    choice: Choice

    def __call__(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *settings: Any
    ) -> tuple[torch.Tensor | None, ...]:
        *_, wanted = settings
        transposed, choice = settings[3], self.choice
        big, small = (gradient, x) if transposed else (x, gradient)
        made: list[torch.Tensor | None] = [None, None, None]
        try:
            for which, algorithm in choice.algorithms:
                if which is Direction.FILTER:
                    made[1] = _run(choice, which, algorithm, (big, small), choice.convolution.weight, choice.strides[1])
                else:
                    inputs = (gradient, weight) if which is Direction.FORWARD else (weight, gradient)
                    made[0] = _run(choice, which, algorithm, inputs, tuple(x.shape), choice.strides[0])
        except CudnnError:
            plain: tuple[torch.Tensor | None, ...] = aten.convolution_backward.default(gradient, x, weight, bias_sizes, *settings)
            return plain
        if wanted[2]:
            made[2] = gradient.sum((0, *range(2, gradient.dim())))
        return tuple(made)

    def work(self, made: Any, *args: Any) -> Work:
        return replace(work_of(aten.convolution_backward.default, made, args, {}), workspace_bytes=self.choice.workspace_bytes)


def _run(
    choice: Choice,
    which: Direction,
    algorithm: Algorithm,
    inputs: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    cudnn = library()
    if cudnn is None:
        raise CudnnError("there is no cuDNN here.")
    expected = _operand_strides(choice.convolution, which)
    first, second = (_expect_strides(choice, t, s) for t, s in zip(inputs, expected, strict=True))
    result = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
    cudnn.run(choice.convolution, which, algorithm, first, second, result)
    return result


def _operand_strides(convolution: Convolution, which: Direction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is said of the two operands of a pass; () for dense."""
    if which is Direction.FORWARD:
        return convolution.input_strides, ()
    return ((), convolution.output_strides) if which is Direction.DATA else (convolution.input_strides, convolution.output_strides)


def _expect_strides(choice: Choice, x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if not strides:
        return x.contiguous(memory_format=CHANNELS_LAST[x.dim()] if choice.convolution.channels_last else torch.contiguous_format)
    if x.stride() != strides:
        raise CudnnError(f"the operand has strides {x.stride()} instead of {strides}.")
    return x
