"""Convolutions by workspace limit: the algorithm that cuDNN expects to be fastest with no more than so many bytes of its own.

    limit      340 MiB   64 MiB   0
    algorithm     7         6      1        fewer bytes, more time; PyTorch's own choice stays the first form

A limit holds for the whole op: in a backward, one for the gradient of the input and one for that of the weight are chosen
together. Same mathematics, other order of sums (Winograd's and Fourier's algorithms are among them, as they are among those that
PyTorch picks from), so this belongs to the variants that round otherwise. The idea is MONeT's (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memfit.capture.captured import OpCall
from memfit.capture.cudnn_algorithms import Algorithm, Convolution, CudnnError, Pass, library
from memfit.capture.rewrite import Rewriter
from memfit.core.graph import Op, Variant
from memfit.core.units import format_bytes

aten = torch.ops.aten
_MOST_OFFERS = 2
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm for each pass that an op makes, and the strides its outputs are expected to have."""

    convolution: Convolution
    algorithms: tuple[tuple[Pass, Algorithm], ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def workspace_bytes(self) -> int:
        return max(a.workspace_bytes for _, a in self.algorithms)


def offer_algorithms(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """At most two other algorithms for a convolution or its backward, with less and less workspace."""
    if not any(rewriter.is_large(t) for t in (*op.inputs, *op.outputs)):
        return
    for choice in choices(rewriter, call):
        target: Any = partial(convolution_backward_by if _is_backward(call) else convolution_by, choice)
        numbers = "+".join(str(a.number) for _, a in choice.algorithms)
        variant = Variant(name=f"algorithm {numbers} in {format_bytes(choice.workspace_bytes)}", inputs=op.inputs, outputs=op.outputs)
        rewriter.add_variant(op.id, variant, replace(call, target=target))


def choices(rewriter: Rewriter, call: OpCall) -> list[Choice]:
    """What is offered for one call; nothing where there is no cuDNN or it cannot say."""
    cudnn = library()
    convolution = described(rewriter, call) if cudnn is not None and torch.backends.cudnn.enabled else None
    if cudnn is None or convolution is None:
        return []
    passes = _passes(call)
    try:
        lists = [_allowed(convolution, cudnn.algorithms(convolution, which)) for which in passes]
    except CudnnError:
        return []
    strides = tuple(() if t is None else tuple(rewriter.sample(t).stride()) for t in call.outputs)
    return [
        Choice(convolution=convolution, algorithms=tuple(zip(passes, picked, strict=True)), strides=strides)
        for picked in few(by_limit(lists, nothing_bytes=rewriter.least_bytes))
    ]


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


def few(picks: list[tuple[Algorithm, ...]]) -> list[tuple[Algorithm, ...]]:
    """The one that takes least and, of the others, the fastest that is not the fastest of all: that one is about PyTorch's own."""
    return picks if len(picks) <= _MOST_OFFERS else [picks[1], picks[-1]]


def _allowed(convolution: Convolution, algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    """Deterministic ones where that is asked for, and none with a workspace larger than all it works on."""
    strict = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    return [a for a in algorithms if (a.deterministic or not strict) and a.workspace_bytes <= convolution.size_bytes]


# -- what a call is ----------------------------------------------------------------------------------------------------


def _is_backward(call: OpCall) -> bool:
    return call.target is aten.convolution_backward.default


def _passes(call: OpCall) -> tuple[Pass, ...]:
    """What a call makes, in the order of its outputs."""
    transposed = call.args[7 if _is_backward(call) else 6]
    if not _is_backward(call):
        return (Pass.DATA if transposed else Pass.FORWARD,)
    wanted = call.args[10]
    back = Pass.FORWARD if transposed else Pass.DATA
    return (*((back,) if wanted[0] else ()), *((Pass.FILTER,) if wanted[1] else ()))


def described(rewriter: Rewriter, call: OpCall) -> Convolution | None:
    """The convolution behind a call, or None for one that cuDNN does not do or that this interface cannot name."""
    backward = _is_backward(call)
    stride, padding, dilation, transposed, _, groups = call.args[4:10] if backward else call.args[3:9]
    near, weight, far = _samples(rewriter, call)
    made = [rewriter.sample(t) for t in call.outputs[:2] if t is not None]
    layout = _layout(made, [near, weight, far])
    if not _passes(call) or layout is None or len({t.dtype for t in (near, weight, far)}) > 1 or near.device.type == "meta":
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
    )
    return found if found.is_supported else None


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
    last = _FORMATS.get(every[0].dim())
    formats = [f for f in (torch.contiguous_format, last) if f is not None and all(t.is_contiguous(memory_format=f) for t in made)]
    if last is None or not formats:
        return None
    return max(formats, key=lambda f: sum(t.is_contiguous(memory_format=f) for t in every)) is last


# -- running one -------------------------------------------------------------------------------------------------------


def convolution_by(choice: Choice, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
    """aten.convolution with the chosen algorithm; PyTorch's own where cuDNN refuses."""
    ((which, algorithm),) = choice.algorithms
    shape = choice.convolution.input if which is Pass.DATA else choice.convolution.output
    inputs = (weight, x) if which is Pass.DATA else (x, weight)
    try:
        result = _run(choice, which, algorithm, inputs, shape, choice.strides[0])
    except CudnnError:
        made: torch.Tensor = aten.convolution.default(x, weight, bias, *settings)
        return made
    return result if bias is None else result.add_(bias.view(1, -1, *(1,) * (x.dim() - 2)))


def convolution_backward_by(
    choice: Choice, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *settings: Any
) -> tuple[torch.Tensor | None, ...]:
    """aten.convolution_backward with the chosen algorithms; PyTorch's own where cuDNN refuses."""
    *_, wanted = settings
    transposed = settings[3]
    big, small = (gradient, x) if transposed else (x, gradient)
    made: list[torch.Tensor | None] = [None, None, None]
    try:
        for which, algorithm in choice.algorithms:
            if which is Pass.FILTER:
                made[1] = _run(choice, which, algorithm, (big, small), choice.convolution.weight, choice.strides[1])
            else:
                inputs = (gradient, weight) if which is Pass.FORWARD else (weight, gradient)
                made[0] = _run(choice, which, algorithm, inputs, tuple(x.shape), choice.strides[0])
    except CudnnError:
        plain: tuple[torch.Tensor | None, ...] = aten.convolution_backward.default(gradient, x, weight, bias_sizes, *settings)
        return plain
    if wanted[2]:
        made[2] = gradient.sum((0, *range(2, gradient.dim())))
    return tuple(made)


def _run(
    choice: Choice,
    which: Pass,
    algorithm: Algorithm,
    inputs: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    cudnn = library()
    if cudnn is None:
        raise CudnnError("there is no cuDNN here.")
    layout = _FORMATS[len(shape)] if choice.convolution.channels_last else torch.contiguous_format
    first, second = (t.contiguous(memory_format=layout) for t in inputs)
    result = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
    cudnn.run(choice.convolution, which, algorithm, first, second, result)
    return result
