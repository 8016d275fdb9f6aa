"""Convolutions by workspace limit: the algorithm that cuDNN expects to be fastest with no more than so many bytes of its own.

    limit      340 MiB   64 MiB   0
    algorithm     7         6      1        fewer bytes, more time; PyTorch's own choice stays the first form

Much of what PyTorch takes beside its tensors is no workspace of cuDNN's but a copy: the gradient of a concatenation comes back as
parts of its channels, and PyTorch makes each part dense. cuDNN reads it where it lies, if told its strides (9.19 on the H200: in
the contiguous layout; with channels last it lists no algorithm for such an operand).

A limit holds for the whole op: in a backward, one for the gradient of the input and one for that of the weight are chosen
together. Same mathematics, other order of sums (Winograd's and Fourier's algorithms are among them, as they are among those that
PyTorch picks from), so this belongs to the variants that round otherwise. The idea is MONeT's (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from memfit.capture.captured import OpCall
from memfit.core.graph import Op, Variant
from memfit.kernels.convolution_algorithms import Choice, ConvolutionBackwardBy, ConvolutionBy
from memfit.kernels.cudnn import Algorithm, Convolution, CudnnError, Direction, library, strides_of
from memfit.kernels.layouts import CHANNELS_LAST
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
_MOST_OFFERS = 2
_T = TypeVar("_T")
_LOADED_BYTES = 16
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def offer_algorithms(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """At most two other algorithms for a convolution or its backward, with less and less workspace."""
    if not any(rewriter.is_large(t) for t in (*op.inputs, *op.outputs)):
        return
    for choice in choices(rewriter, call):
        target = (ConvolutionBackwardBy if _is_backward(call) else ConvolutionBy)(choice)
        rewriter.add_variant(op.id, Variant(name=choice.name, inputs=op.inputs, outputs=op.outputs), replace(call, target=target))


def choices(rewriter: Rewriter, call: OpCall) -> list[Choice]:
    """What is offered for one call; nothing where there is no cuDNN or it cannot say.

    The first pick by limit is what PyTorch runs too (measured on the H200: the same bits), so it is offered only without a copy. One with
    a workspace larger than all it works on is never offered.
    """
    cudnn = library() if torch.backends.cudnn.enabled else None
    convolution = describe(rewriter, call, cudnn.device_type) if cudnn is not None else None
    if convolution is None:
        return []
    picks = [(convolution, pick) for pick in _picks(rewriter, call, convolution)]
    if not picks or not convolution.has_strides:
        dense = replace(convolution, input_strides=(), output_strides=())
        picks = [(dense, pick) for pick in _picks(rewriter, call, dense)][1:]
    picks = [(layer, pick) for layer, pick in picks if max(a.workspace_bytes for a in pick) <= layer.size_bytes]
    strides = tuple(() if t is None else tuple(rewriter.sample(t).stride()) for t in call.outputs)
    return [
        Choice(convolution=layer, algorithms=tuple(zip(_directions(call), pick, strict=True)), strides=strides)
        for layer, pick in few(picks)
    ]


def _picks(rewriter: Rewriter, call: OpCall, convolution: Convolution) -> list[tuple[Algorithm, ...]]:
    cudnn = library()
    assert cudnn is not None
    try:
        lists = [_allowed(cudnn.algorithms(convolution, which)) for which in _directions(call)]
    except CudnnError:
        return []
    return by_limit(lists, nothing_bytes=rewriter.least_bytes)


def by_limit(lists: Sequence[Sequence[Algorithm]], *, nothing_bytes: int = 0) -> list[tuple[Algorithm, ...]]:
    """The first algorithm of each list that keeps to a limit, for every limit that makes a difference, from the largest down.

    The lists are in the order of expected speed, so each pick is slower than the one before and takes less. Workspaces up to
    `nothing_bytes` are as good as none.
    """
    found: dict[tuple[Algorithm, ...], None] = {}
    for limit in sorted({max(a.workspace_bytes, nothing_bytes) for listed in lists for a in listed}, reverse=True):
        picked = tuple(next((a for a in listed if a.workspace_bytes <= limit), None) for listed in lists)
        known = tuple(a for a in picked if a is not None)
        if len(known) == len(lists):
            found[known] = None
    return list(found)


def few(picks: list[_T]) -> list[_T]:
    """The fastest, and the one that takes least."""
    return picks if len(picks) <= _MOST_OFFERS else [picks[0], picks[-1]]


def _allowed(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    """Deterministic ones where that is asked for."""
    strict = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    return [a for a in algorithms if a.deterministic or not strict]


# -- what a call is ----------------------------------------------------------------------------------------------------


def _is_backward(call: OpCall) -> bool:
    return call.target is aten.convolution_backward.default


def _directions(call: OpCall) -> tuple[Direction, ...]:
    """What a call makes, in the order of its outputs."""
    transposed = call.args[7 if _is_backward(call) else 6]
    if not _is_backward(call):
        return (Direction.DATA if transposed else Direction.FORWARD,)
    wanted = call.args[10]
    back = Direction.FORWARD if transposed else Direction.DATA
    return (*((back,) if wanted[0] else ()), *((Direction.FILTER,) if wanted[1] else ()))


def describe(rewriter: Rewriter, call: OpCall, device_type: str) -> Convolution | None:
    """The convolution behind a call, or None for one that cuDNN does not do, that this interface cannot name, or that runs elsewhere."""
    backward = _is_backward(call)
    stride, padding, dilation, transposed, _, groups = call.args[4:10] if backward else call.args[3:9]
    near, weight, far = _samples(rewriter, call)
    made = [rewriter.sample(t) for t in call.outputs[:2] if t is not None]
    layout = _layout(made, [near, weight, far])
    if not _directions(call) or layout is None or len({t.dtype for t in (near, weight, far)}) > 1 or near.device.type != device_type:
        return None
    big, small = (far, near) if transposed else (near, far)
    spatial = near.dim() - 2
    found = Convolution(
        dtype=near.dtype,
        channels_last=layout,
        input=tuple(big.shape),
        weight=tuple(weight.shape),
        output=tuple(small.shape),
        padding=_each(padding, spatial),
        stride=_each(stride, spatial),
        dilation=_each(dilation, spatial),
        groups=groups,
        tf32=torch.backends.cudnn.allow_tf32,
        device=_device_number(near.device),
        input_strides=_strides_of_part(big, layout),
        output_strides=_strides_of_part(small, layout),
    )
    return found if found.is_supported else None


def _strides_of_part(sample: torch.Tensor, channels_last: bool) -> tuple[int, ...]:
    """The strides of some channels of a larger dense tensor; () of anything else. Kernels load 16 bytes at a time."""
    strides, dense = tuple(sample.stride()), strides_of(sample.shape, channels_last=channels_last)
    aligned = sample.storage_offset() * sample.element_size() % _LOADED_BYTES == 0
    if channels_last:
        pixel = strides[-1]
        expected = strides_of((sample.shape[0], pixel, *sample.shape[2:]), channels_last=True)
        is_part = pixel > sample.shape[1] and strides[1] == 1 and strides == expected
        aligned = aligned and pixel * sample.element_size() % _LOADED_BYTES == 0
    else:
        is_part = strides[0] > dense[0] and strides[1:] == dense[1:]
        aligned = aligned and strides[0] * sample.element_size() % _LOADED_BYTES == 0
    return strides if is_part and aligned else ()


def _samples(rewriter: Rewriter, call: OpCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the layer's input, its weight, its output or the gradient of that)."""
    if _is_backward(call):
        gradient, x, weight = (rewriter.sample(a.tensor) for a in call.args[:3])
        return x, weight, gradient
    assert call.outputs[0] is not None
    x, weight = (rewriter.sample(a.tensor) for a in call.args[:2])
    return x, weight, rewriter.sample(call.outputs[0])


def _device_number(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _each(values: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == count else tuple(values) * count


def _layout(made: Sequence[torch.Tensor], every: Sequence[torch.Tensor]) -> bool | None:
    """Whether channels come last in everything made; where both can be said, as most of what is there says. None: neither."""
    last = CHANNELS_LAST.get(every[0].dim())
    formats = [f for f in (torch.contiguous_format, last) if f is not None and all(t.is_contiguous(memory_format=f) for t in made)]
    if last is None or not formats:
        return None
    return max(formats, key=lambda f: sum(t.is_contiguous(memory_format=f) for t in every)) is last


CONVOLUTION_ALGORITHMS = Pass(
    name="convolution-algorithms",
    where="convolution",
    becomes="another algorithm of cuDNN, that may read an operand where it lies",
    saves="workspace, a dense copy of a part of a concatenation",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at(dict.fromkeys(CONVOLUTIONS, offer_algorithms)),
)
