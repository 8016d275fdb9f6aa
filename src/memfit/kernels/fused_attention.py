"""PyTorch's fused kernels for attention without dropout and mask, each forward with the backward that reads its sums.

flash       ──> out, its sums ──> flash's backward
cudnn       ──> out, its sums ──> cudnn's backward        `out` is the same tensor either way, the sums have a shape of their own
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.implementation import Implementation, Work
from memfit.kernels.layouts import lay_out

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Kernel:
    """`forward(q, k, v, causal, scale)` gives (out, sums); `backward(g, q, k, v, out, sums, causal, scale)` three gradients."""

    name: str
    backward_op: Any  # of aten, in a step that PyTorch's own choice made
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    sums_shape: Callable[[torch.Tensor], tuple[int, ...]]
    can_use: Callable[[Any], bool]

    def __repr__(self) -> str:
        return self.name


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> Tensors:
    made = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, scale=scale)
    return made[0], made[1]


def _flash_backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> Tensors:
    sizes, none = (q.shape[2], k.shape[2]), _undrawn(q)
    backward: Any = aten._scaled_dot_product_flash_attention_backward.default
    made: Tensors = backward(g, q, k, v, out, sums, None, None, *sizes, 0.0, causal, none, none, scale=scale)
    return made


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> Tensors:
    made = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, causal, scale=scale)
    return made[0], made[1]


def _efficient_backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> Tensors:
    wanted, none = [True, True, True, False], _undrawn(q)
    backward: Any = aten._scaled_dot_product_efficient_attention_backward.default
    made: Tensors = backward(g, q, k, v, None, out, sums, none, none, 0.0, wanted, causal, scale=scale)
    return made[:3]


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> Tensors:
    made = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, scale=scale)
    return made[0], made[1]


def _cudnn_backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> Tensors:
    sizes, none = (q.shape[2], k.shape[2]), _undrawn(q)
    backward: Any = aten._scaled_dot_product_cudnn_attention_backward.default
    made: Tensors = backward(g, q, k, v, out, sums, none, none, None, None, None, *sizes, 0.0, causal, scale=scale)
    return made


def _undrawn(q: torch.Tensor) -> torch.Tensor:
    """In place of the state of a generator that nothing was drawn from."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


KERNELS: dict[Any, Kernel] = {
    aten._scaled_dot_product_flash_attention.default: Kernel(
        name="flash",
        backward_op=aten._scaled_dot_product_flash_attention_backward.default,
        forward=_flash,
        backward=_flash_backward,
        sums_shape=lambda q: tuple(q.shape[:3]),
        can_use=lambda params: torch.backends.cuda.can_use_flash_attention(params),
    ),
    aten._scaled_dot_product_efficient_attention.default: Kernel(
        name="efficient",
        backward_op=aten._scaled_dot_product_efficient_attention_backward.default,
        forward=_efficient,
        backward=_efficient_backward,
        sums_shape=lambda q: (*q.shape[:2], -(-q.shape[2] // 32) * 32),
        can_use=lambda params: torch.backends.cuda.can_use_efficient_attention(params),
    ),
    aten._scaled_dot_product_cudnn_attention.default: Kernel(
        name="cudnn",
        backward_op=aten._scaled_dot_product_cudnn_attention_backward.default,
        forward=_cudnn,
        backward=_cudnn_backward,
        sums_shape=lambda q: (*q.shape[:3], 1),
        can_use=lambda params: torch.backends.cuda.can_use_cudnn_attention(params),
    ),
}


@dataclass(frozen=True, slots=True)
class AttentionBy(Implementation):
    """(out, sums) by one kernel, `out` in the strides that the step expects."""

    kernel: Kernel
    strides: tuple[int, ...]

    def __call__(self, *arguments: Any) -> Tensors:
        out, sums = self.kernel.forward(*arguments)
        return lay_out(out, self.strides), sums

    def work(self, made: Tensors, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Work:
        flops = count_attention_flops(query, key.shape[-2], num_products=2)
        return Work.over((query, key, rest), made, flops=flops)


@dataclass(frozen=True, slots=True)
class AttentionBackwardBy(Implementation):
    """Gradients of queries, keys and values by one kernel, from the sums of its own forward."""

    kernel: Kernel
    strides: tuple[tuple[int, ...], ...]

    def __call__(self, *arguments: Any) -> Tensors:
        made = self.kernel.backward(*arguments)
        return tuple(lay_out(x, strides) for x, strides in zip(made, self.strides, strict=True))

    def work(self, made: Tensors, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Work:
        flops = count_attention_flops(query, key.shape[-2], num_products=5)
        return Work.over((gradient, query, key, rest), made, flops=flops)


def count_attention_flops(query: torch.Tensor, num_keys: int, *, num_products: int) -> float:
    """Each product multiplies and adds once for each score and each number of a head's width: two forward, five backward."""
    return 2.0 * num_products * query.numel() * num_keys
