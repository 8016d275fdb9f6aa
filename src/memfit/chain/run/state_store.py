"""Where states wait while a chain runs: memory, pinned host memory, disk; with writes behind the compute and reads ahead of it.

    compute   F F F F F F F B  F F B  F B ...
    writer       └ x_40 ┘                        one snapshot under way at most
    reader                   └ x_12 ┘            one prefetched state at most

Both buffers are part of the memory budget. What the store holds is counted at every change; `peak_bytes` is the most there was.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from memfit.chain.run.state_files import StateFolder
from memfit.chain.run.states import copy_to_host, copy_tree, move_like, tree_bytes

MEMORY, HOST, DISK = "memory", "host", "disk"


class StateStore:
    """`places[k]` names where level k of the plan is."""

    def __init__(self, places: tuple[str, ...], folder: StateFolder | None, model: Any, working_bytes: int) -> None:
        self.places, self.folder, self.model = places, folder, model
        self.held: dict[tuple[int, int], Any] = {}  # (level, step) -> state, for levels in memory
        self.writing: dict[int, Future[None]] = {}
        self.reading: tuple[int, Future[Any]] | None = None
        self.doomed: set[int] = set()  # files no longer needed once the adjoint that replaces them is safe
        self.working_bytes = self.bytes = self.peak_bytes = working_bytes
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="memfit-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="memfit-read")

    def write(self, step: int, level: int, state: Any) -> None:
        """Keep a copy of x_step at a level; on disk it is written behind the compute."""
        if self.places[level] == DISK:
            self.settle()
            self.doomed.discard(step)
            snapshot = copy_to_host(state)
            self._count(tree_bytes(snapshot))
            self.writing[step] = self._writer.submit(self._write_file, step, snapshot)
        else:
            kept = copy_to_host(state) if self.places[level] == HOST else copy_tree(state)
            self.held[level, step] = kept
            if self.places[level] == MEMORY:
                self._count(tree_bytes(kept))

    def _write_file(self, step: int, snapshot: Any) -> None:
        assert self.folder is not None
        self.folder.write("state", step, snapshot)

    def settle(self) -> None:
        """Wait for the write under way; its failure is raised here."""
        for step, future in list(self.writing.items()):
            try:
                future.result()
            finally:
                del self.writing[step]
                self._count(-tree_bytes(self.model))

    def prefetch(self, step: int) -> None:
        """Begin to read x_step from disk, unless a read is under way."""
        if self.reading is None:
            self._count(tree_bytes(self.model))
            self.reading = (step, self._reader.submit(self._read_file, step, self.writing.get(step)))

    def _read_file(self, step: int, after: Future[None] | None) -> Any:
        assert self.folder is not None
        if after is not None:
            after.result()
        return self.folder.read("state", step, self.model)

    def read(self, step: int, level: int, *, last: bool) -> Any:
        """x_step for the working buffer. `last`: nobody reads it again, so the stored copy itself is given."""
        if self.places[level] != DISK:
            kept = self.held[level, step]
            if last and self.places[level] == MEMORY:
                return kept
            return move_like(kept, self.model)
        if self.reading is not None and self.reading[0] != step:
            self.forget_prefetch()
        if self.reading is None:
            self.prefetch(step)
        assert self.reading is not None
        future = self.reading[1]
        self.reading = None
        try:
            state = future.result()
        finally:
            self._count(-tree_bytes(self.model))
        return move_like(state, self.model, own=True)

    def forget_prefetch(self) -> None:
        if self.reading is not None:
            self.reading[1].exception()  # wait; a failure matters only to whoever needs the state
            self.reading = None
            self._count(-tree_bytes(self.model))

    def drop(self, step: int, level: int) -> None:
        """Forget a copy. A file stays until `sweep` finds that resuming does not need it."""
        if self.places[level] == DISK:
            self.doomed.add(step)
        else:
            kept = self.held.pop((level, step))
            if self.places[level] == MEMORY:
                self._count(-tree_bytes(kept))

    def sweep(self, save_adjoint: Callable[[], None]) -> None:
        """Save the adjoint, then remove the files it makes unnecessary. In this order: a kill between leaves too much, not too little."""
        if self.doomed and self.folder is not None:
            self.settle()
            save_adjoint()
            for step in self.doomed:
                self.folder.drop("state", step)
            self.doomed.clear()

    def close(self) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._reader.shutdown(wait=True, cancel_futures=True)
        self.held.clear()

    def _count(self, change: int) -> None:
        self.bytes += change
        self.peak_bytes = max(self.peak_bytes, self.bytes)
