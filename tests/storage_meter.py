"""How many bytes tensors hold, counted by a dispatch mode: it shares no code with memfit and none with torch's profiler.

Every storage that an op makes counts from then until it is freed. What an op takes inside itself and gives back (workspace) is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """`held` bytes now, `peak` the most so far, beyond what was there at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (
            () if func is torch.ops.aten.lift_fresh.default else tree_leaves((args, kwargs))
        )  # a number becomes a tensor before it comes here
        known = {_key(t) for t in given if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in known:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self._alive.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class AllocationMeter:
    """The same for compiled code, which asks the allocator itself: by what torch's profiler hears of it, workspace included.

    `peak` is known when the block ends. The copy of the CPU generator's state that is taken for an instant before a step is left out: 5 KB
    that are no tensor of the step, and more than all of a very small one.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> AllocationMeter:
        self._profile.__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        self._profile.__exit__(*about)
        changes = [
            (event.start_ns(), event.nbytes()) for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"
        ]
        copied = torch.get_rng_state().nbytes
        for _, change in sorted(changes, key=lambda c: c[0]):
            if abs(change) == copied:
                continue
            self.held += change
            self.peak = max(self.peak, self.held)
