"""Where torch's tracing tells another story than its kernels, the trace is put right here.

- The layout that tracing expects of some ops is not the one their kernels give. They are traced as what the kernel does.
- The traced form of multi-layer recurrent networks forgets the dropout between layers (torch 2.13 and before).
- On the CPU recurrent layers are one oneDNN call whose workspace tracing does not know: traced as cells instead.
- Some losses compute every element into their output before they reduce it, and the scalar keeps those bytes.
- The CPU's batch norm of half-precision inputs saves its statistics in the type of its weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import Tensor

_ATEN = torch.ops.aten
_BATCH_NORMS = {_ATEN._native_batch_norm_legit_functional.default, _ATEN.native_batch_norm.default, _ATEN._native_batch_norm_legit.default}
_WIDE_LOSSES = {_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default}


def decompositions(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """Ops to trace as something else, bit for bit the same."""
    table: dict[Any, Callable[..., Any]] = {_ATEN.native_layer_norm_backward.default: _layer_norm_backward}
    if device.type == "cpu":
        table[_ATEN.native_dropout_backward.default] = _dropout_backward
    return table


def _layer_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    """The kernel works on contiguous copies and gives a contiguous gradient, whatever the input's layout."""
    if grad.is_contiguous() and x.is_contiguous():
        return NotImplemented  # nothing to put right: trace the op itself
    return _ATEN.native_layer_norm_backward.default(grad.contiguous(), x.contiguous(), *rest)


def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    """The CPU kernel is two multiplications, which keep the gradient's layout."""
    if grad.is_contiguous():
        return NotImplemented
    return grad * mask * scale


def real_sample(target: Any, position: int, sample: Tensor, arguments: Sequence[Any]) -> Tensor:
    """What output number `position` of the op really is like."""
    if target in _BATCH_NORMS and position in (1, 2) and sample.device.type == "cpu" and isinstance(arguments[1], Tensor):
        return sample.to(arguments[1].dtype)
    return sample


def wide_output_bytes(target: Any, arguments: Sequence[Any]) -> int | None:
    """Bytes behind the scalar of a loss that reduces in place; None for all other ops."""
    if target not in _WIDE_LOSSES or (len(arguments) > 2 and arguments[2] == 0):
        return None
    x, y = arguments[:2]
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return int(shape.numel()) * torch.result_type(x, y).itemsize


@contextlib.contextmanager
def faithful_recurrence() -> Iterator[None]:
    """Recurrent layers are traced as cells, with dropout between the layers. Convolutions keep oneDNN, which gives other layouts."""
    original = getattr(torch_decompositions, "_rnn_helper", None)
    select, mkldnn = torch._C._select_conv_backend, torch._C._get_mkldnn_enabled()

    def select_with_mkldnn(*args: Any, **kwargs: Any) -> Any:
        torch._C._set_mkldnn_enabled(mkldnn)
        try:
            return select(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(False)

    torch._C._set_mkldnn_enabled(False)
    torch._C._select_conv_backend = select_with_mkldnn
    if original is not None:
        torch_decompositions._rnn_helper = _layer_by_layer(original)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._select_conv_backend = select
        if original is not None:
            torch_decompositions._rnn_helper = original


def _shaped(state: Any, given: Any) -> Any:
    """A layer's last state like its first: of an LSTM, which has two, torch 2.11 gives them with a dimension too many."""
    if not isinstance(given, Tensor):
        return tuple(map(_shaped, state, given))
    return state if state.shape == given.shape else state.view(given.shape)


def _layer_by_layer(original: Any) -> Any:
    def helper(
        x: Tensor,
        hidden: Any,
        params: Any,
        biases: Any,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
        layer: Any,
    ) -> Any:
        x = x.transpose(0, 1) if batch_first else x
        width = 2 if both else 1
        last: list[Any] = []
        for i in range(layers):
            own = slice(width * i, width * (i + 1))
            x, states = original(x, hidden[own], params[own], biases, 1, 0.0, train, both, False, layer)
            last.extend(_shaped(state, given) for state, given in zip(states, hidden[own], strict=True))
            if dropout and train and i < layers - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), last

    return helper
