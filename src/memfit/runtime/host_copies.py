"""Copies of a step's storages on the host, made and brought back beside the ops.

    compute   ── F1 ── F2 ─────────── Free waits ── F3 ...  allocate ───────── B3 waits for what it reads
    out            └── copy ──┘
    in                                                           └── copy ──┘

On CUDA each direction has a stream of its own and the host's copy lies in pinned memory, which torch keeps for the next step. Order is
kept by events: a copy begins when the ops before it are done, memory goes when its copy is complete, and a reader waits for its copy. On
the CPU, where this only serves tests and trials, copies are made at once, outside torch's allocator.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from memfit.core.errors import Unsupported

_Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


class HostCopies:
    """Of one forward and its backward. Storages go by the plan's numbers; every tensor that views one comes back with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[int, torch.Tensor] = {}
        self._layouts: dict[int, tuple[_Layout, ...]] = {}
        self._sent: dict[int, Any] = {}
        self._arrived: dict[int, Any] = {}

    def send(self, storage: int, *tensors: torch.Tensor) -> None:
        """Begin to copy the storage that these tensors view."""
        bytes_ = _bytes_of(tensors[0])
        self._layouts[storage] = tuple((t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset())) for t in tensors)
        if self._device.type != "cuda":
            self._host[storage] = torch.from_numpy(np.empty(bytes_.numel(), np.uint8)).copy_(bytes_)
            return
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported('a step that sends values to the host cannot be captured in a CUDA graph: fit without "offload".')
        host = self._host[storage] = torch.empty(bytes_.numel(), dtype=torch.uint8, pin_memory=True)
        self._sent[storage] = _copy(host, bytes_, _streams(self._device)[0])

    def wait_sent(self, storage: int) -> None:
        """What comes now may use the storage's memory again."""
        if storage in self._sent:
            torch.cuda.current_stream(self._device).wait_event(self._sent[storage])

    def fetch(self, storage: int) -> Any:
        """Begin to copy it back: its tensors, one or a tuple, which may be read after `wait_arrived`."""
        host = self._host[storage]
        here = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            inward = _streams(self._device)[1]
            inward.wait_event(self._sent[storage])
            self._arrived[storage] = _copy(here, host, inward)
        else:
            here.copy_(host)
        tensors = tuple(_view(here, *layout) for layout in self._layouts[storage])
        return tensors[0] if len(tensors) == 1 else tensors

    def wait_arrived(self, storage: int) -> None:
        """What comes now may read what was fetched."""
        event = self._arrived.pop(storage, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def drop(self, storage: int) -> None:
        """The host's copy is not needed any more; torch holds its memory until copies from it are complete."""
        del self._host[storage]
        self._sent.pop(storage, None)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """(to the host, from the host)."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Copy on `stream`, after what the current stream has been given so far; the event of its end."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    done: torch.cuda.Event = stream.record_event()
    return done


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _view(here: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=here.device).set_(here.untyped_storage(), offset, shape, stride)
