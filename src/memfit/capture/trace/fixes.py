"""Where torch's tracing tells another story than its kernels, the trace is put right here.

- The layout that tracing expects of some ops is not the one their kernels give. They are traced as what the kernel does.
- Some losses compute every element into their output before they reduce it, and the scalar keeps those bytes; what changes a part of a
  tensor copies the whole storage that the part lies in.
- The CPU's batch norm of half-precision inputs saves its statistics in the type of its weights.
- Dropout on the CPU is traced as an op that scales by another last bit than the plain model does.

(Recurrent layers are put right in `torch_private/recurrent.py`, which has to patch torch for it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ATEN = torch.ops.aten
_BATCH_NORMS = {_ATEN._native_batch_norm_legit_functional.default, _ATEN.native_batch_norm.default, _ATEN._native_batch_norm_legit.default}
_COPY_ALL = {
    _ATEN.copy.default,
    _ATEN.slice_scatter.default,
    _ATEN.select_scatter.default,
    _ATEN.diagonal_scatter.default,
    _ATEN.as_strided_scatter.default,
}
_WIDE_LOSSES = {_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default}


def decompositions(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """Ops to trace as something else, bit for bit the same."""
    table: dict[Any, Callable[..., Any]] = {_ATEN.native_layer_norm_backward.default: _layer_norm_backward}
    if device.type == "cpu":
        table[_ATEN.native_dropout.default] = _dropout
        table[_ATEN.native_dropout_backward.default] = _dropout_backward
    return table


def _layer_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    """The kernel works on contiguous copies and gives a contiguous gradient, whatever the input's layout."""
    if grad.is_contiguous() and x.is_contiguous():
        return NotImplemented  # nothing to put right: trace the op itself
    return _ATEN.native_layer_norm_backward.default(grad.contiguous(), x.contiguous(), *rest)


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """The op scales by 1/(1-p) in double precision, rounded; the plain model divides in single. They differ for one p in seven (0.15)."""
    if train is False or x.dtype is not torch.float32 or p == 1:
        return NotImplemented
    scale = 1 / (1 - p)
    if _plain_scale(scale) == _rounded(scale):
        return NotImplemented
    mask = _ATEN.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * (mask.to(x.dtype) * _plain_scale(scale)), mask


def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    """The CPU kernel is two multiplications, which keep the gradient's layout. The plain model multiplies by a scaled mask of the
    gradient's own type, which in half precision is another number."""
    if grad.dtype in (torch.bfloat16, torch.float16):
        return grad * (mask.to(grad.dtype) * scale)
    plain = _plain_scale(scale) if grad.dtype is torch.float32 and scale else scale
    if not grad.is_contiguous():
        return grad * mask * plain
    if _rounded(plain) == _rounded(scale):
        return NotImplemented
    return _ATEN.native_dropout_backward.default(grad, mask, plain)


def _plain_scale(scale: float) -> float:
    """What a kept element is multiplied by in the plain model: one by 1-p, both in single precision."""
    return float(np.float32(1) / np.float32(1 / scale))


def _rounded(scale: float) -> float:
    return float(np.float32(scale))


def is_put_right(target: Any) -> bool:
    """Whether outputs of this op need `real_sample` or `wide_output_bytes`."""
    return target in _BATCH_NORMS or target in _COPY_ALL or target in _WIDE_LOSSES


def real_sample(target: Any, position: int, sample: Tensor, arguments: Sequence[Any]) -> Tensor:
    """What output number `position` of the op really is like."""
    if target in _BATCH_NORMS and position in (1, 2) and sample.device.type == "cpu" and isinstance(arguments[1], Tensor):
        return sample.to(arguments[1].dtype)
    return sample


def wide_output_bytes(target: Any, arguments: Sequence[Any]) -> int | None:
    """Bytes behind the scalar of a loss that reduces in place, and behind a changed part of a tensor: its kernel copies all that the tensor
    is a part of. None for all other ops."""
    if target in _COPY_ALL:
        return int(arguments[0].untyped_storage().nbytes())
    if target not in _WIDE_LOSSES or (len(arguments) > 2 and arguments[2] == 0):
        return None
    x, y = arguments[:2]
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return int(shape.numel()) * torch.result_type(x, y).itemsize
