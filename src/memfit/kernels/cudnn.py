"""cuDNN's convolution algorithms one by one: which there are for a convolution, what workspace each takes, and running one.

    Convolution ──> algorithms(pass) ──> (Algorithm 1: 0 bytes, Algorithm 6: 340 MiB, ...)   in the order cuDNN expects them fastest
    Convolution, Algorithm, tensors ──> run                                                     the workspace is a tensor of ours

PyTorch picks one algorithm for a convolution and does not say which others there are. cuDNN does, through the C interface of the
library that PyTorch has loaded already. Everything private to cuDNN is in this file: names, constants and layouts of its version 7
interface, which versions 8 and 9 still export. Where anything of it is missing (CPU, ROCm, a later version), `library()` is None.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
_HALF = (torch.float16, torch.bfloat16)
_NCHW, _NHWC = 0, 1
_DEFAULT_MATH, _TENSOR_OP_MATH, _FMA_MATH = 0, 1, 3
_CROSS_CORRELATION = 1
_MOST_ALGORITHMS = 32
_MOST_ELEMENTS = 2**31 - 1  # strides are 32 bits wide


class Direction(Enum):
    """One of the three convolutions of a layer, by the middle of cuDNN's names for it."""

    FORWARD = "Forward"  # input, weight -> output
    DATA = "BackwardData"  # weight, gradient of output -> gradient of input
    FILTER = "BackwardFilter"  # input, gradient of output -> gradient of weight


class CudnnError(RuntimeError):
    """cuDNN refused a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """`number` and `math` are cuDNN's own; `math` says whether tensor cores may round the factors."""

    number: int
    math: int
    workspace_bytes: int
    deterministic: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A layer as cuDNN sees it. A transposed layer is the same with `input` and `output` exchanged, and its passes too."""

    dtype: torch.dtype
    channels_last: bool
    input: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    tf32: bool
    device: int = -1  # of CUDA; -1 for memory of the host
    input_strides: tuple[int, ...] = ()  # of an operand that is no dense tensor but a part of the channels of a larger one
    output_strides: tuple[int, ...] = ()

    @property
    def is_supported(self) -> bool:
        """Whether this interface can name it: images or volumes, not empty, and offsets that fit in 32 bits."""
        sizes = [math.prod(shape) for shape in (self.input, self.weight, self.output)]
        return self.dtype in _DTYPES and len(self.input) in (4, 5) and all(0 < n <= _MOST_ELEMENTS for n in sizes)

    @property
    def has_strides(self) -> bool:
        """Whether an operand is a part of a larger tensor."""
        return bool(self.input_strides or self.output_strides)

    @property
    def size_bytes(self) -> int:
        """Of the three tensors together."""
        return self.dtype.itemsize * sum(math.prod(shape) for shape in (self.input, self.weight, self.output))


class _Performance(ctypes.Structure):
    """cudnnConvolution{Fwd,BwdData,BwdFilter}AlgoPerf_t: the three have one layout."""

    _fields_ = (
        ("algo", ctypes.c_int),
        ("status", ctypes.c_int),
        ("time", ctypes.c_float),
        ("memory", ctypes.c_size_t),
        ("determinism", ctypes.c_int),
        ("math", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
    )


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_INTS = ctypes.POINTER(ctypes.c_int)
_OUT = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": (_OUT,),
    "cudnnSetStream": (_POINTER, _POINTER),
    "cudnnCreateTensorDescriptor": (_OUT,),
    "cudnnSetTensorNdDescriptor": (_POINTER, _INT, _INT, _INTS, _INTS),
    "cudnnCreateFilterDescriptor": (_OUT,),
    "cudnnSetFilterNdDescriptor": (_POINTER, _INT, _INT, _INT, _INTS),
    "cudnnCreateConvolutionDescriptor": (_OUT,),
    "cudnnSetConvolutionNdDescriptor": (_POINTER, _INT, _INTS, _INTS, _INTS, _INT, _INT),
    "cudnnSetConvolutionMathType": (_POINTER, _INT),
    "cudnnSetConvolutionGroupCount": (_POINTER, _INT),
    **{f"cudnnGetConvolution{p.value}Algorithm_v7": (*(_POINTER,) * 5, _INT, _INTS, ctypes.POINTER(_Performance)) for p in Direction},
    **{f"cudnnGetConvolution{p.value}WorkspaceSize": (*(_POINTER,) * 5, _INT, ctypes.POINTER(_SIZE)) for p in Direction},
    **{f"cudnnConvolution{p.value}": (*(_POINTER,) * 7, _INT, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER) for p in Direction},
}


@functools.cache
def library() -> Library | None:
    """The cuDNN that PyTorch has loaded, or None where there is none or it lacks what is needed here."""
    if torch.version.hip is not None or not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return None
    for name in _candidates():
        try:
            return Library(name)
        except (OSError, AttributeError):
            continue
    return None


def _candidates() -> Iterator[str]:
    """By its short name, which finds what is loaded already; then by the path from which this process has it."""
    version = torch.backends.cudnn.version() or 0
    yield f"libcudnn.so.{version // 10_000 if version >= 90_000 else version // 1_000}"
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    paths = {line.split(maxsplit=5)[5] for line in lines if "libcudnn.so" in line}
    yield from sorted(paths)


class Library:
    """The functions of one cuDNN. Handles and descriptors live as long as the process; calls are made one at a time.

    `device_type`: where the tensors are that it reads and writes."""

    def __init__(self, name: str, *, device_type: str = "cuda") -> None:
        self.device_type = device_type
        self._functions = ctypes.CDLL(name)
        self._error_text = self._functions.cudnnGetErrorString
        self._error_text.restype, self._error_text.argtypes = ctypes.c_char_p, (_INT,)
        for symbol, arguments in _SIGNATURES.items():
            function = getattr(self._functions, symbol)
            function.restype, function.argtypes = _INT, arguments
        self._lock = threading.RLock()  # a handle serves one thread at a time, and backward has a thread of its own
        self._handles: dict[int, Any] = {}
        self._streams: dict[int, int] = {}
        self._known: dict[Any, Any] = {}  # descriptors

    def algorithms(self, convolution: Convolution, which: Direction) -> tuple[Algorithm, ...]:
        """Those that can do it, in the order cuDNN expects them to be fast. Runs nothing on the device."""
        key = ("algorithms", convolution, which)
        if key not in self._known:
            self._known[key] = self._listed(convolution, which)
        found: tuple[Algorithm, ...] = self._known[key]
        return found

    def _listed(self, convolution: Convolution, which: Direction) -> tuple[Algorithm, ...]:
        with self._lock, _on(convolution.device):
            parts = self._descriptors(convolution, which, _wanted_math(convolution))
            found, count = (_Performance * _MOST_ALGORITHMS)(), ctypes.c_int(0)
            symbol = f"cudnnGetConvolution{which.value}Algorithm_v7"
            self._call(symbol, self._handle(convolution.device), *parts, _MOST_ALGORITHMS, ctypes.byref(count), found)
            listed: dict[tuple[int, int], Algorithm] = {}
            for entry in found[: count.value]:
                fixed = convolution.dtype is torch.float32 and not convolution.tf32
                key = (entry.algo, _FMA_MATH if fixed else entry.math)
                if entry.status == 0 and key not in listed:
                    size = self._workspace_bytes(convolution, which, *key)
                    if size is not None:
                        listed[key] = Algorithm(number=key[0], math=key[1], workspace_bytes=size, deterministic=entry.determinism == 1)
        return tuple(listed.values())

    def run(
        self,
        convolution: Convolution,
        which: Direction,
        algorithm: Algorithm,
        first: torch.Tensor,
        second: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Fill `result`. The tensors must have the shapes and the layout of `convolution`, in the order that `Direction` says."""
        size = algorithm.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=result.device) if size else None
        with self._lock, _on(convolution.device):
            a, b, settings, c = self._descriptors(convolution, which, algorithm.math)
            self._call(
                f"cudnnConvolution{which.value}",
                self._handle(convolution.device),
                _scale(1.0, convolution.dtype),
                *(a, first.data_ptr(), b, second.data_ptr()),
                *(settings, algorithm.number, None if workspace is None else workspace.data_ptr(), size),
                _scale(0.0, convolution.dtype),
                *(c, result.data_ptr()),
            )

    def _workspace_bytes(self, convolution: Convolution, which: Direction, number: int, math_type: int) -> int | None:
        size = ctypes.c_size_t(0)
        parts = self._descriptors(convolution, which, math_type)
        symbol = f"cudnnGetConvolution{which.value}WorkspaceSize"
        try:
            self._call(symbol, self._handle(convolution.device), *parts, number, ctypes.byref(size))
        except CudnnError:
            return None
        return size.value

    def _call(self, symbol: str, *arguments: Any) -> None:
        status = getattr(self._functions, symbol)(*arguments)
        if status != 0:
            text = self._error_text(status)
            raise CudnnError(f"{symbol} failed with status {status}, {text.decode(errors='replace') if text else 'unknown'}.")

    def _handle(self, device: int) -> Any:
        """One per device, on the stream that is current."""
        if device not in self._handles:
            self._handles[device] = self._made("cudnnCreate")
        if device >= 0:
            stream = torch.cuda.current_stream(device).cuda_stream
            if self._streams.get(device) != stream:
                self._call("cudnnSetStream", self._handles[device], stream)
                self._streams[device] = stream
        return self._handles[device]

    # -- descriptors -----------------------------------------------------------------------------------------------

    def _descriptors(self, convolution: Convolution, which: Direction, math_type: int) -> tuple[Any, Any, Any, Any]:
        """(first, second, settings, result) of a pass. A result is always dense, also where the operand of the same shape is not."""
        one = self._tensor(convolution, convolution.input, () if which is Direction.DATA else convolution.input_strides)
        weight = self._filter(convolution)
        other = self._tensor(convolution, convolution.output, () if which is Direction.FORWARD else convolution.output_strides)
        settings = self._settings(convolution, math_type)
        if which is Direction.FORWARD:
            return one, weight, settings, other
        return (weight, other, settings, one) if which is Direction.DATA else (one, other, settings, weight)

    def _tensor(self, convolution: Convolution, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        strides = strides or strides_of(shape, channels_last=convolution.channels_last)
        key = ("tensor", shape, strides, convolution.dtype)
        if key not in self._known:
            made = self._made("cudnnCreateTensorDescriptor")
            self._call("cudnnSetTensorNdDescriptor", made, _DTYPES[convolution.dtype], len(shape), _ints(shape), _ints(strides))
            self._known[key] = made
        return self._known[key]

    def _filter(self, convolution: Convolution) -> Any:
        shape = convolution.weight
        key = ("filter", shape, convolution.dtype, convolution.channels_last)
        if key not in self._known:
            made = self._made("cudnnCreateFilterDescriptor")
            layout = _NHWC if convolution.channels_last else _NCHW
            self._call("cudnnSetFilterNdDescriptor", made, _DTYPES[convolution.dtype], layout, len(shape), _ints(shape))
            self._known[key] = made
        return self._known[key]

    def _settings(self, convolution: Convolution, math_type: int) -> Any:
        sums = _DTYPES[torch.float32 if convolution.dtype in _HALF else convolution.dtype]
        lists = (convolution.padding, convolution.stride, convolution.dilation)
        key = ("settings", *lists, convolution.groups, sums, math_type)
        if key not in self._known:
            made = self._made("cudnnCreateConvolutionDescriptor")
            self._call("cudnnSetConvolutionNdDescriptor", made, len(lists[0]), *map(_ints, lists), _CROSS_CORRELATION, sums)
            self._call("cudnnSetConvolutionGroupCount", made, convolution.groups)
            self._call("cudnnSetConvolutionMathType", made, math_type)
            self._known[key] = made
        return self._known[key]

    def _made(self, symbol: str) -> Any:
        made = ctypes.c_void_p()
        self._call(symbol, ctypes.byref(made))
        return made


def strides_of(shape: Sequence[int], *, channels_last: bool) -> tuple[int, ...]:
    """Of a dense tensor in that layout; also where a size of 1 would let torch say anything."""
    order = (0, *range(2, len(shape)), 1) if channels_last else range(len(shape))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _wanted_math(convolution: Convolution) -> int:
    """As PyTorch asks for it."""
    if convolution.dtype in _HALF:
        return _TENSOR_OP_MATH
    return _FMA_MATH if convolution.dtype is torch.float32 and not convolution.tf32 else _DEFAULT_MATH


def _ints(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*values)


@functools.cache
def _scale(value: float, dtype: torch.dtype) -> Any:
    """alpha and beta are read through a pointer, in double precision only for such tensors."""
    number = ctypes.c_double(value) if dtype is torch.float64 else ctypes.c_float(value)
    return _Kept(number)


class _Kept:
    """A pointer to a number that stays where it is."""

    def __init__(self, number: Any) -> None:
        self._number = number
        self._as_parameter_ = ctypes.c_void_p(ctypes.addressof(number))


def _on(device: int) -> Any:
    return torch.cuda.device(device)  # does nothing for -1
