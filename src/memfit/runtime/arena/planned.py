"""Planned arenas on CUDA: one step's allocations at planned offsets inside one cudaMalloc, so that reserved = planned height.

    first step    recorded: every allocation and free, in order, served from a pool
    next begin    packed: lifetimes ──> offsets (the layout solver); the pool's cache is given back, the arena taken
    from then on  replayed: the k-th allocation goes to the k-th offset; what deviates comes from the pool, and is packed anew

Where in the flow: `use_planned_arena()` before CUDA is used puts our allocator (arena.cpp) under the whole process; each
planned step then has a StepArena, which its Session enters around forward and backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfit.core.cache_folder import cache_folder
from memfit.core.errors import Unsupported
from memfit.core.lifetimes import SCRATCH, Lifetime
from memfit.core.plan import Layout
from memfit.runtime.arena.library import ArenaStats, Ints, Library, Verdict, load_cuda
from memfit.torch_private.cuda import device_index
from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.probe import require_tested

BLOCK_BYTES = 512
"""Sizes and offsets are multiples of this, as in torch's own allocator."""
_ELSEWHERE = -1
_MAX_PACKINGS = 8  # a step that never repeats itself is not packed for ever

Pack = Callable[[Sequence[Lifetime]], Layout]


class Allocator:
    """The library and who ran last on it: what a step leaves behind is judged when the next one begins."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.unsettled: tuple[StepArena, int] | None = None

    def stats(self, device: int | torch.device | None = None) -> ArenaStats:
        """What the allocator holds and has taken from the driver on one device, by default the current one."""
        return self.library.stats(device_index(device))

    def settle(self) -> None:
        """Look at the last finished run: what deviated or outlived its step is packed anew."""
        if self.unsettled is not None:
            (step, run), self.unsettled = self.unsettled, None
            step.settle(run)
            self.library.functions.memfit_drop_run(run)


class StepArena:
    """The arena of one planned step. `start` a run for every forward; enter it around forward and backward; `finish` it."""

    def __init__(self, allocator: Allocator, device: int, pack: Pack) -> None:
        self.allocator, self.device, self.pack, self.library = allocator, device, pack, allocator.library
        self.library.functions.memfit_empty()  # what measuring left behind: lasting tensors would settle in it and pin it
        self.program = int(self.library.functions.memfit_new_program(device))
        self.num_packings = 0
        self.height_bytes: int | None = None  # None until the first packing, and where the arena could not be had
        self.last: Verdict | None = None
        self._outliving: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._sizes: Ints = np.zeros(0, np.int64)
        weakref.finalize(self, self.library.functions.memfit_drop_program, self.program).atexit = False

    def start(self) -> Run:
        self.allocator.settle()
        return Run(self)

    def reserved_bytes(self) -> int:
        """All that the process has taken from the device, after what it does not need went back."""
        self.allocator.settle()
        self.library.functions.memfit_empty()
        return self.library.stats(self.device).reserved_bytes

    def settle(self, run: int) -> None:
        verdict = self.last = self.library.verdict(run)
        if (self.height_bytes is not None and verdict.is_clean) or self.num_packings >= _MAX_PACKINGS:
            self.library.functions.memfit_tidy(self.program)
            return
        rows, end = self.library.read_run(run, verdict.made)
        sizes = np.ascontiguousarray(rows[:, 0])
        outliving = rows[:, 2] < 0
        if np.array_equal(sizes, self._sizes):
            outliving |= self._outliving  # once held across steps, always kept out of the arena
        self._sizes, self._outliving = sizes, outliving
        self._commit(rows, end)

    def _commit(self, rows: Ints, end: int) -> None:
        inside = np.nonzero(~self._outliving)[0]
        items = [Lifetime(storage=SCRATCH, start=int(a), stop=min(int(b), end), size_bytes=int(s)) for s, a, b in rows[inside]]
        layout = self.pack(items)
        offsets = np.full(len(rows), _ELSEWHERE, np.int64)
        offsets[inside] = layout.offsets
        self.num_packings += 1
        got_it = self.library.commit(self.program, self._sizes, offsets, layout.height_bytes)
        self.height_bytes = layout.height_bytes if got_it else None


class Run:
    """One forward and its backward: a context to be entered by whichever thread does the work, several times if need be."""

    def __init__(self, step: StepArena) -> None:
        self.step = step
        self.functions = step.library.functions
        self.id = int(self.functions.memfit_new_run(step.program))
        self._before: list[int] = []
        self._drop = weakref.finalize(self, self.functions.memfit_drop_run, self.id)
        self._drop.atexit = False

    def __enter__(self) -> Run:
        self._before.append(int(self.functions.memfit_enter(self.id)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.functions.memfit_enter(self._before.pop())

    def finish(self) -> None:
        """Backward is done. The books of this run stay open until the next step begins, to see what outlives it."""
        self.functions.memfit_finish_run(self.id)
        allocator = self.step.allocator
        if allocator.unsettled is not None:  # another step finished in between: only the latest is looked at
            self.functions.memfit_drop_run(allocator.unsettled[1])
        if self._drop.detach() is not None:
            allocator.unsettled = (self.step, self.id)


_installed: list[Allocator] = []
_lasting = ExitStack()  # patches that stay as long as the allocator: to the end of the process


def installed() -> Allocator | None:
    """The process's planned-arena allocator, if `use_planned_arena` was called."""
    return _installed[0] if _installed else None


def use_planned_arena(*, folder: str | Path | None = None) -> Allocator:
    """From now on this process's CUDA memory comes from memfit's allocator, and fitted models run at planned offsets in one arena.

    Call it before anything touches CUDA. Needs a C++ compiler the first time; the library is kept in `folder` (default: memfit's
    cache). `torch.cuda.memory_allocated`, `max_memory_reserved` and their like then report this allocator's figures.
    """
    if _installed:
        return _installed[0]
    require_tested("use planned arenas", "Leave out use_planned_arena()")
    if torch.version.cuda is None:
        raise Unsupported(
            f"torch {torch.__version__} is built without CUDA: planned arenas are for CUDA devices; leave out use_planned_arena()."
        )
    if torch.cuda.is_initialized():
        raise Unsupported(
            "CUDA is in use already, and an allocator cannot be changed under live tensors: call memfit.use_planned_arena() right after "
            "the imports, before the first .cuda(), torch.cuda.synchronize() or tensor on a CUDA device."
        )
    library = load_cuda(Path(folder) if folder is not None else cache_folder("arena"))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library.path), "memfit_alloc", "memfit_free")
    inner: Any = allocator.allocator()
    inner.set_reset_fn(library.address("memfit_empty"))
    inner.set_memory_fraction_fn(library.address("memfit_set_fraction"))
    inner.set_record_stream_fn(library.address("memfit_record_stream"))
    torch.cuda.memory.change_current_allocator(allocator)
    _installed.append(Allocator(library))
    _report_through_torch(_installed[0])
    return _installed[0]


def _report_through_torch(allocator: Allocator) -> None:
    """torch asks a pluggable allocator for no figures and raises instead: its functions are pointed at ours."""

    def nested(device: Any = None) -> dict[str, Any]:
        if not torch.cuda.is_initialized():
            return {}
        s = allocator.stats(device)
        return {
            "allocated_bytes": {"all": {"current": s.allocated_bytes, "peak": s.allocated_peak_bytes}},
            "reserved_bytes": {"all": {"current": s.reserved_bytes, "peak": s.reserved_peak_bytes}},
            "allocation": {"all": {"allocated": s.num_allocations}},
        }

    def reset_peaks(device: Any = None) -> None:
        allocator.library.functions.memfit_reset_peaks(device_index(device))

    ours = {"memory_stats_as_nested_dict": nested, "reset_peak_memory_stats": reset_peaks}
    patches = (Patch(module, name, function) for module in (torch.cuda.memory, torch.cuda) for name, function in ours.items())
    _lasting.enter_context(patch_torch("report memory through torch", *patches))
