"""Other implementations of ops, as functions an engine can call: exact, with other memory.

Each replaces aten kernels by the same mathematics: a sign packed in bits instead of an activation, an index in 16 bits instead
of 64, a convolution over slices of the batch, a loss whose logits never exist whole. Plain functions of tensors; which op they
stand in for is decided in `variants.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


# -- bits instead of activations ---------------------------------------------------------------------------------------


def packed_bytes(num_elements: int) -> int:
    return -(-num_elements // 8)


def pack_positive(x: torch.Tensor) -> torch.Tensor:
    """One bit per element: whether it is above zero. In memory order, so that strides do not matter."""
    return pack_bits(_in_memory_order(x) > 0)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    flat = _in_memory_order(mask)
    missing = -flat.numel() % 8
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=flat.device)
    return (flat.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def _unpack_like(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The bits as a boolean tensor with the shape and strides of `like`."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    flat = (packed.unsqueeze(1) & weights).view(-1)[: like.numel()] != 0
    return flat.as_strided(like.shape, like.stride())


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,))


def threshold_backward_from_bits(
    gradient: torch.Tensor, packed: torch.Tensor, like: tuple[tuple[int, ...], tuple[int, ...]]
) -> torch.Tensor:
    """relu's gradient from one bit per element; `like` is (shape, strides) of relu's output."""
    mask = _unpack_like(packed, torch.empty_strided(*like, dtype=torch.bool, device="meta"))
    return torch.where(mask, gradient, 0)


def dropout_backward_from_bits(
    gradient: torch.Tensor, packed: torch.Tensor, scale: float, like: tuple[tuple[int, ...], tuple[int, ...]]
) -> torch.Tensor:
    mask = _unpack_like(packed, torch.empty_strided(*like, dtype=torch.bool, device="meta"))
    result: torch.Tensor = aten.native_dropout_backward.default(gradient, mask, scale)
    return result


# -- indices and statistics --------------------------------------------------------------------------------------------


def narrow_indices(indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return indices.to(dtype)


def max_pool_backward_from_narrow(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`rest` ends with the narrow indices, as max_pool2d_with_indices_backward's arguments do."""
    *settings, narrow = rest
    result: torch.Tensor = aten.max_pool2d_with_indices_backward.default(gradient, x, *settings, narrow.to(torch.int64))
    return result


def batch_norm_apply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, eps: float
) -> torch.Tensor:
    """Batch norm's output again, from its input and the statistics it saved: no reduction over the batch."""
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, deviation, eps)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = weight * deviation
    return torch.addcmul((bias - mean * scale).view(shape), x, scale.view(shape))


def layer_norm_apply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
) -> torch.Tensor:
    return torch.addcmul(bias, (x - mean).mul_(deviation), weight)


# -- less at a time ----------------------------------------------------------------------------------------------------


def convolution_in_slices(num_slices: int, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A convolution over slices of the batch: the workspace of one slice at a time."""
    first = aten.convolution.default(x[:1], weight, *rest)
    output = torch.empty((x.shape[0], *first.shape[1:]), dtype=first.dtype, device=first.device, memory_format=_layout_of(first))
    del first
    for part, place in zip(x.chunk(num_slices), output.chunk(num_slices), strict=True):
        place.copy_(aten.convolution.default(part, weight, *rest))
    return output


def convolution_backward_in_slices(
    num_slices: int, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[Any, ...]:
    """Gradients of the input slice by slice; those of weight and bias added up over slices."""
    *settings, mask = rest
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


# -- parts of a concatenation ------------------------------------------------------------------------------------------


def gradient_of_part(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    channels: tuple[int, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """A convolution's gradient for channels [start, stop) of its input, in these strides: a transposed convolution, which asks for no input
    (`convolution_backward` does, and works in that one's layout)."""
    start, stop = channels
    own = _copied(weight[:, start:stop], strides)
    sizes = zip(shape[2:], gradient.shape[2:], own.shape[2:], stride, padding, dilation, strict=True)
    left = [size - ((short - 1) * step - 2 * pad + spread * (window - 1) + 1) for size, short, window, step, pad, spread in sizes]
    made: torch.Tensor = aten.convolution.default(gradient, own, None, stride, padding, dilation, True, left, 1)
    return made if made.stride() == strides else torch.empty_strided(shape, strides, dtype=made.dtype, device=made.device).copy_(made)


def parameter_gradients_from_parts(
    strides: tuple[int, ...] | None,
    gradient: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias_sizes: Any,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    """(None, gradient of the weight in these strides, gradient of the bias) of a convolution whose input is the parts side by side."""
    *geometry, (_, has_weight, has_bias) = rest
    whole = None if strides is None else torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device)
    bias: torch.Tensor | None = None
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        mask = [False, has_weight, has_bias and start == 0]
        made = aten.convolution_backward.default(gradient, part, _copied(weight[:, start:stop], part.stride()), bias_sizes, *geometry, mask)
        if whole is not None:
            whole[:, start:stop].copy_(made[1])
        bias = made[2] if mask[2] else bias
        start = stop
        del made
    return None, whole, bias


def _copied(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Without gaps, dimensions in the order of these strides."""
    return torch.empty_strided(x.shape, dense_strides(tuple(x.shape), order), dtype=x.dtype, device=x.device).copy_(x)


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, dimensions in the order of `strides`."""
    made = [1] * len(shape)
    extent = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        made[d] = extent
        extent *= max(shape[d], 1)
    return tuple(made)


def _layout_of(x: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def chunked_loss(
    num_chunks: int, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: int, ignore: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy of hidden @ weight, number of targets that count), a chunk of rows at a time."""
    total = torch.zeros((), dtype=dtype, device=hidden.device)
    for rows, labels in zip(hidden.chunk(num_chunks), target.chunk(num_chunks), strict=True):
        logits = torch.mm(rows, weight).to(dtype)
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")
        del logits
    count = (target != ignore).sum().to(dtype)
    return (total / count if reduction == 1 else total), count


def chunked_loss_backward(
    num_chunks: int,
    tangent: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    reduction: int,
    ignore: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the transposed weight, gradient of hidden); weights accumulate in at least 32 bits."""
    scale = (tangent / count if reduction == 1 else tangent).to(dtype)
    wide = torch.float32 if hidden.dtype in (torch.float16, torch.bfloat16) else hidden.dtype
    weight_gradient = torch.zeros((weight.shape[1], weight.shape[0]), dtype=wide, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    for rows, labels, place in zip(hidden.chunk(num_chunks), target.chunk(num_chunks), hidden_gradient.chunk(num_chunks), strict=True):
        change = torch.softmax(torch.mm(rows, weight).to(dtype), 1)
        counted = labels != ignore
        safe = torch.where(counted, labels, 0).unsqueeze(1)
        change.scatter_add_(1, safe, torch.full_like(safe, -1, dtype=dtype))
        change.mul_((counted * scale).unsqueeze(1))
        narrow = change.to(hidden.dtype)
        del change
        torch.mm(narrow, weight.t(), out=place)
        if wide == hidden.dtype:
            weight_gradient.addmm_(narrow.t(), rows)
        else:
            weight_gradient += torch.mm(narrow.t(), rows)
        del narrow
    return weight_gradient.to(hidden.dtype), hidden_gradient


class InPlace:
    """A pointwise op that writes its result over one of its arguments."""

    __slots__ = ("keyword", "overload", "position")

    def __init__(self, overload: Any, keyword: str, position: int) -> None:
        self.overload, self.keyword, self.position = overload, keyword, position

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.overload(*args, **kwargs, **{self.keyword: args[self.position]})
        return result

    def __repr__(self) -> str:
        return f"{self.overload} over argument {self.position}"
