"""Run a backpropagation chain of your own functions inside a memory budget, with the optimal schedule and real storage.

    state0 ──step_fn──> x_1 ──> ... ──> x_l ──seed──> y_l ──adjoint_fn(x_{l-1}, y_l)──> ... ──> y_0

The budget and the measured costs become storage levels, H-Revolve plans over them, and the moves are executed one by one:
states are copied to memory, pinned host memory or files, written behind the compute and read ahead of it. A run with a
folder survives a kill: called again it goes on from the files it finds.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write, count_moves
from memfit.chain.problem import Chain, StorageLevel
from memfit.chain.run.levels import ChainCosts, Room, add_step_argument, make_room, measure, open_folder
from memfit.chain.run.state_files import StateFolder
from memfit.chain.run.state_store import DISK, HOST, StateStore
from memfit.chain.run.states import copy_tree, flatten, leaf_bytes, leaf_header, move_to_device_of, tree_bytes, view_bytes
from memfit.chain.strategies.even_spacing import evenly_spaced_moves
from memfit.chain.strategies.hrevolve import Tables, make_tables
from memfit.core.errors import BadInput, NoPlanFound, StorageFailed, Unsupported

CALLER = -1  # the level of a Read that takes state0 again, which the caller holds anyway
LOOKAHEAD = 64
PLANNING_ADDITIONS = 4e10  # about ten seconds of table; beyond, checkpoints are spread evenly instead

StepFn = Callable[[Any, int], Any]
AdjointFn = Callable[[Any, Any, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRun:
    """`adjoint` is y_0. `peak_bytes` counts states and adjoints in memory; `resumed_at` is the backward step a resumed run went on with."""

    adjoint: Any
    num_forward: int
    num_backward: int
    writes: dict[str, int]
    reads: dict[str, int]
    peak_bytes: int
    seconds: float
    costs: ChainCosts
    slots: dict[str, int | None]
    resumed_at: int | None = None


def run_chain(
    step_fn: StepFn,
    adjoint_fn: AdjointFn,
    state0: Any,
    num_steps: int,
    *,
    budget: int | str,
    host: int | str | None = None,
    disk: int | str | None = None,
    folder: str | Path | None = None,
    seed: Any = None,
    adjoint_bytes: int | str | None = None,
    costs: ChainCosts | None = None,
    resume: bool = True,
    save_every_s: float = 60.0,
    key: str = "",
    progress: bool = False,
) -> ChainRun:
    """Compute y_0, the adjoint of `state0`, holding at most `budget` bytes of states and adjoints in memory.

    `step_fn(x, i)` returns x_{i+1} and `adjoint_fn(x, y, i)` returns y_i from x_i and y_{i+1}; both may overwrite their arguments, and
    leave out `i` if they do not need it.
    `seed` is y_l or a function of x_l; without it `adjoint_fn(x_l, None, l)` gives y_l. States and adjoints are NumPy arrays,
    torch tensors or trees of them; gradients of parameters belong in the adjoint (`adjoint_bytes` where it is larger than a state).

    `disk` bytes of checkpoints go to `folder` (a temporary one unless given; given alone it is without limit). With a folder an
    interrupted run goes on when called again with the same arguments; `key` tells runs apart that look alike from outside.
    """
    if isinstance(num_steps, bool) or int(num_steps) != num_steps or num_steps < 0:
        raise BadInput(f"num_steps is {num_steps!r}: give a whole number of steps, 0 or more.")
    step_fn, adjoint_fn = add_step_argument(step_fn, 1), add_step_argument(adjoint_fn, 2)
    begin = time.perf_counter()
    sized = adjoint_bytes if adjoint_bytes is not None else tree_bytes(state0 if seed is None or callable(seed) else seed)
    room = make_room(state0, sized, num_steps, budget, host, disk, use_disk=disk is not None or folder is not None)
    files, temporary = open_folder(folder, disk)
    finished = keep = False
    runner: _Runner | None = None
    try:
        if files is not None:
            files.claim(_describe(state0, seed, num_steps, key), resume=resume)
        point = _resume_point(files, state0, seed, num_steps, room)
        measured, first = (costs, None) if costs else measure(step_fn, state0, room, None if point.found else files, num_steps)
        runner = _Runner(step_fn, adjoint_fn, state0, seed, num_steps, room, files, point, None if point.found else first, save_every_s)
        stream = _stream(num_steps, room, measured, point)
        runner.run(stream() if not progress else _show_progress(stream))
        finished = True
        return runner.result(begin, measured)
    except StorageFailed:
        keep = True  # even a temporary folder: its path is in the message, and nothing in it is lost
        raise
    finally:
        if runner is not None:
            runner.store.close()
        if files is not None:
            files.close(remove=finished or (temporary and not keep))
            if temporary and not keep:
                files.folder.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Where to begin: the next backward step, the adjoint before it, and the states on disk at or below it."""

    next_back: int
    adjoint: Any
    kept: tuple[int, ...]
    found: bool


def _resume_point(files: StateFolder | None, state0: Any, seed: Any, num_steps: int, room: Room) -> _Point:
    """The newest adjoint that can be read, and every state file that can; damaged files are removed, and the run goes on without them."""
    if files is None:
        return _Point(next_back=num_steps, adjoint=None, kept=(), found=False)
    next_back, adjoint = num_steps, None
    model = seed if seed is not None and not callable(seed) else state0
    for step in files.steps("adjoint"):
        try:
            adjoint, next_back = move_to_device_of(files.read("adjoint", step, model), state0), step - 1
            break
        except StorageFailed:
            files.drop("adjoint", step)
    kept = []
    for step in files.steps("state"):
        try:
            if step <= next_back:
                files.read("state", step, state0)
                kept.append(step)
                continue
        except StorageFailed:
            pass
        files.drop("state", step)
    limit = room.slots[-1]
    for step in kept[limit:] if limit is not None else []:  # the disk budget was made smaller
        files.drop("state", step)
    kept = kept if limit is None else kept[:limit]
    return _Point(next_back=next_back, adjoint=adjoint, kept=tuple(kept), found=adjoint is not None or bool(kept))


def _stream(num_steps: int, room: Room, costs: ChainCosts, point: _Point) -> Callable[[], Iterator[Move]]:
    """The moves from a point on, as a function that starts them afresh."""
    chain = _chain(num_steps, room, costs)
    disk = len(room.places) - 1 if room.places[-1] == DISK else None
    try:
        tables: Tables | None = make_tables(chain, max_additions=PLANNING_ADDITIONS)
    except NoPlanFound:
        tables = None
    capacity = num_steps if disk is None or room.slots[disk] is None else room.slots[disk] or 0

    def solve(length: int, offset: int, disk_slots: int) -> Iterator[Move]:
        if tables is None:
            return evenly_spaced_moves(chain, length, offset=offset, max_segments=disk_slots)
        top = len(tables.levels) - 1
        bounded = top >= 0 and disk is not None and tables.levels[top].level == disk
        return tables.moves(length, offset=offset, top=top, slots=min(disk_slots, tables.levels[top].slots) if bounded else None)

    def moves() -> Iterator[Move]:
        need = point.next_back
        for below in range(len(point.kept) - 1, -1, -1):
            start = point.kept[below]
            assert disk is not None
            yield Read(start, disk)
            segment = solve(need - start, start, capacity - below)
            opening = next(segment)
            if not (isinstance(opening, Write) and opening.level == disk):  # it is on disk already: either that is wanted, or it can go
                yield Drop(start, disk)
                yield opening
            yield from segment
            need = start - 1
        if need >= 0:
            if point.found:
                yield Read(0, CALLER)
            yield from solve(need, 0, capacity)

    return moves


def _chain(num_steps: int, room: Room, costs: ChainCosts) -> Chain:
    """Memory copies count as free; deeper levels cost at least as much as those above, so that they nest."""
    levels, write, read = [], 0.0, 0.0
    for place, slots in zip(room.places, room.slots, strict=True):
        if place == HOST:
            write, read = max(write, costs.host_write_s), max(read, costs.host_read_s)
        elif place == DISK:
            write, read = max(write, costs.disk_write_s), max(read, costs.disk_read_s)
        levels.append(StorageLevel(slots=slots, write_cost=write, read_cost=read))
    return Chain(num_steps=num_steps, levels=tuple(levels), forward_cost=costs.forward_s, backward_cost=0.0)


class _Runner:
    """Obeys moves: the working buffer, the adjoint, and the store."""

    def __init__(
        self,
        step_fn: StepFn,
        adjoint_fn: AdjointFn,
        state0: Any,
        seed: Any,
        num_steps: int,
        room: Room,
        files: StateFolder | None,
        point: _Point,
        first: Any,
        save_every_s: float,
    ) -> None:
        self.step_fn, self.adjoint_fn, self.state0, self.seed = step_fn, adjoint_fn, state0, seed
        self.num_steps, self.room, self.files, self.save_every_s = num_steps, room, files, save_every_s
        self.store = StateStore(room.places, files, state0, room.working_bytes)
        self.state: Any = None if point.found else copy_tree(state0)
        self.first = first  # x_1, made while measuring
        self.adjoint = point.adjoint
        self.saved_step: int | None = point.next_back + 1 if point.adjoint is not None else None
        self.saved_at = time.monotonic()
        self.resumed_at = point.next_back if point.found else None
        self.step = point.next_back + 1  # the adjoint at hand is y_step
        self.num_forward = self.num_backward = 0
        self.writes, self.reads = dict.fromkeys(room.places, 0), dict.fromkeys(room.places, 0)

    def run(self, moves: Iterator[Move]) -> None:
        """Every move in turn, with a window on the ones to come: for reading ahead, and to know a last read."""
        window: deque[Move] = deque()
        source = iter(moves)
        while True:
            while len(window) < LOOKAHEAD and (following := next(source, None)) is not None:
                window.append(following)
            if not window:
                break
            self._read_ahead(window)
            move = window.popleft()
            self._obey(move, window[0] if window else None)
        self.store.settle()

    def _read_ahead(self, window: deque[Move]) -> None:
        if self.files is None or self.store.reading is not None:
            return
        for move in window:
            if type(move) is Read and move.level != CALLER and self.room.places[move.level] == DISK:
                self.store.prefetch(move.step)
                return
            if type(move) is Write and self.room.places[move.level] == DISK:
                return  # what is read after it may be what it writes

    def _obey(self, move: Move, following: Move | None) -> None:
        if isinstance(move, Advance):
            self._advance(move)
        elif isinstance(move, Back):
            self._back(move.step)
        elif isinstance(move, Write):
            self._write(move)
        elif isinstance(move, Drop):
            self.store.drop(move.step, move.level)
        elif move.level == CALLER:
            self.state = copy_tree(self.state0)
        else:
            last = isinstance(following, Drop) and (following.step, following.level) == (move.step, move.level)
            self.state = self.store.read(move.step, move.level, last=last)
            self.reads[self.room.places[move.level]] += 1

    def _advance(self, move: Advance) -> None:
        for step in range(move.start, move.stop):
            if step == 0 and self.first is not None:
                self.state, self.first = self.first, None
            else:
                self.state = self.step_fn(self.state, step)
            self.num_forward += 1

    def _write(self, move: Write) -> None:
        size = tree_bytes(self.state)
        if size != self.room.state_bytes:
            raise Unsupported(
                f"x_{move.step} has {size} bytes, x_0 has {self.room.state_bytes}: run_chain plans for states of one size; pad them, or "
                "use memfit.chain.strategies.heterogeneous to plan for sizes that differ."
            )
        if self.room.places[move.level] == DISK and self.adjoint is not None:
            self.store.sweep(self._save_adjoint)
        self.store.write(move.step, move.level, self.state)
        self.writes[self.room.places[move.level]] += 1

    def _back(self, step: int) -> None:
        if step < self.num_steps or self.seed is None:
            self.adjoint = self.adjoint_fn(self.state, self.adjoint, step)
        else:
            self.adjoint = self.seed(self.state) if callable(self.seed) else copy_tree(self.seed)
        if step == self.num_steps and tree_bytes(self.adjoint) > self.room.adjoint_bytes:
            raise BadInput(
                f"the adjoint has {tree_bytes(self.adjoint)} bytes, {self.room.adjoint_bytes} were planned for: "
                f"pass adjoint_bytes={tree_bytes(self.adjoint)}."
            )
        self.state = None
        self.num_backward += 1
        self.step = step
        if self.files is None:
            return
        if self.store.doomed and min(self.store.doomed) >= step:
            self.store.sweep(self._save_adjoint)
        elif time.monotonic() - self.saved_at > self.save_every_s:
            self._save_adjoint()

    def _save_adjoint(self) -> None:
        assert self.files is not None
        if self.saved_step != self.step:
            self.files.write("adjoint", self.step, self.adjoint)
            if self.saved_step is not None:
                self.files.drop("adjoint", self.saved_step)
            self.saved_step = self.step
        self.saved_at = time.monotonic()

    def result(self, begin: float, costs: ChainCosts) -> ChainRun:
        return ChainRun(
            adjoint=self.adjoint,
            num_forward=self.num_forward,
            num_backward=self.num_backward,
            writes=self.writes,
            reads=self.reads,
            peak_bytes=self.store.peak_bytes,
            seconds=time.perf_counter() - begin,
            costs=costs,
            slots=dict(zip(self.room.places, self.room.slots, strict=True)),
            resumed_at=self.resumed_at,
        )


def _describe(state0: Any, seed: Any, num_steps: int, key: str) -> dict[str, Any]:
    """What must be equal for files to belong to this run."""
    leaves, structure = flatten(state0)
    shapes = [{k: v for k, v in leaf_header(x).items() if k != "value"} for x in leaves]
    fixed = [] if seed is None or callable(seed) else flatten(seed)[0]
    return {
        "format": "memfit.chain-run",
        "version": 1,
        "num_steps": num_steps,
        "key": key,
        "structure": structure.describe(),
        "leaves": shapes,
        "fingerprint": [_fingerprint(x) for x in (*leaves, *fixed)],
    }


def _fingerprint(leaf: Any) -> int:
    return zlib.crc32(view_bytes(leaf)) if leaf_bytes(leaf) else zlib.crc32(repr(leaf).encode())


def _show_progress(stream: Callable[[], Iterator[Move]]) -> Iterator[Move]:
    """The same moves with a progress bar on stderr, in steps computed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counts = count_moves(stream(), 0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("chain", total=counts.num_forward + counts.num_backward)
        for move in stream():
            yield move
            if isinstance(move, Advance | Back):
                bar.advance(task, move.stop - move.start if isinstance(move, Advance) else 1)
