"""Batch norm by cuDNN, and norms whose output is made again from their input and the statistics they saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.implementation import Implementation, Work
from memfit.kernels.layouts import find_memory_format

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class BatchNormAgain(Implementation):
    """Batch norm's output from its input and saved statistics: no reduction over the batch."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x.is_cuda:
            return torch.batch_norm_elemt(x, weight, bias, mean, deviation, eps)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = weight * deviation
        return torch.addcmul((bias - mean * scale).view(shape), x, scale.view(shape))

    def work(self, made: torch.Tensor, *args: Any) -> Work:
        return Work.over(args, made)


@dataclass(frozen=True, slots=True)
class LayerNormAgain(Implementation):
    """Layer norm's output from its input and saved statistics."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
    ) -> torch.Tensor:
        return torch.addcmul(bias, (x - mean).mul_(deviation), weight)

    def work(self, made: torch.Tensor, *args: Any) -> Work:
        return Work.over(args, made)


@dataclass(frozen=True)
class CudnnBatchNorm(Implementation):
    """(output, saved mean, saved inverse deviation, new running mean, new running variance, cuDNN's reserve).

    The running statistics are copied first, so that the op is a function and may run again.
    """

    name = "cudnn_batch_norm"
    __name__ = name  # fx asks for it

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        training: bool,
        momentum: float,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        new_mean, new_variance = mean.clone(), variance.clone()
        output, saved_mean, saved_deviation, reserve = aten.cudnn_batch_norm.default(
            x, weight, bias, new_mean, new_variance, training, momentum, eps
        )
        return output, saved_mean, saved_deviation, new_mean, new_variance, reserve

    def work(self, made: tuple[torch.Tensor, ...], *args: Any) -> Work:
        return Work.over(args, made)


@dataclass(frozen=True)
class CudnnBatchNormBackward(Implementation):
    """Gradients of input, weight and bias."""

    name = "cudnn_batch_norm_backward"
    __name__ = name

    def __call__(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        saved_mean: torch.Tensor,
        saved_deviation: torch.Tensor,
        eps: float,
        reserve: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        gradient = gradient.contiguous(memory_format=find_memory_format(x))  # cuDNN wants it to lie as the input does
        result: tuple[torch.Tensor, ...] = aten.cudnn_batch_norm_backward.default(
            x, gradient, weight, None, None, saved_mean, saved_deviation, eps, reserve
        )
        return result

    def work(self, made: tuple[torch.Tensor, ...], *args: Any) -> Work:
        return Work.over(args, made)


CUDNN_BATCH_NORM, CUDNN_BATCH_NORM_BACKWARD = CudnnBatchNorm(), CudnnBatchNormBackward()
