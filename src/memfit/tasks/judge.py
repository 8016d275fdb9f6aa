"""The judge of orders and of parallel schedules: replays them on the graph and imports no algorithm.

time      0 ──────── 2 ──────── 5 ─────── 6        at one instant what ends is dealt with before what starts, in the
runs      [── a ──][──── c ────][── d ──]          order in which the runs are listed
          [── b ──]
memory    what is alive + working memory of what runs + outputs under way
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.core.errors import IllegalSchedule
from memfit.core.units import format_bytes
from memfit.jit.kernel import kernel_above
from memfit.tasks.graph import COMPILE_FROM, Bools, Ints, TaskGraph

_SLACK = 1e-9  # of the makespan: sums of times that are not whole numbers differ by a hair from branch to branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Memory while an order runs: `bytes_at_step[k]` during its k-th task."""

    bytes_at_step: Ints
    peak_bytes: int
    peak_step: int


@dataclass(frozen=True, slots=True)
class Run:
    """One task under way: from `start` to `stop` on `processors` of them (a share, when a task is spread or shares one)."""

    task: int
    start: float
    stop: float
    processors: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelProfile:
    """Memory over time as a step function: `bytes_held[k]` from `times[k]` on."""

    makespan: float
    peak_bytes: int
    times: tuple[float, ...]
    bytes_held: tuple[int, ...]


def judge_order(graph: TaskGraph, order: Ints | Sequence[int]) -> Profile:
    """Replay an order on one processor. Raises IllegalSchedule when it is not a topological order of all tasks."""
    steps = np.asarray(order, np.int64)
    _check_complete(graph, steps)
    held = np.empty(len(steps), np.int64)
    left = graph.readers.counts.copy()
    bad = _replay(
        steps, graph.makes.ptr, graph.makes.ids, graph.reads.ptr, graph.reads.ids,
        graph.item_bytes, graph.item_producer, graph.item_kept, graph.memory_bytes, left, held, graph.initial_bytes,
    )  # fmt: skip
    if bad >= 0:
        raise IllegalSchedule(bad, f"task {graph.names[int(steps[bad])]!r} runs before one of those it reads from.")
    if not len(steps):
        return Profile(bytes_at_step=held, peak_bytes=graph.initial_bytes, peak_step=-1)
    peak = int(held.argmax())
    return Profile(bytes_at_step=held, peak_bytes=max(int(held[peak]), graph.initial_bytes), peak_step=peak)


def _check_complete(graph: TaskGraph, steps: Ints) -> None:
    n = graph.num_tasks
    if len(steps) != n or (n and (steps.min() < 0 or steps.max() >= n)) or len(np.unique(steps)) != n:
        raise IllegalSchedule(-1, f"the order has {len(np.unique(steps))} distinct tasks in {len(steps)} steps, the graph has {n} tasks.")


@kernel_above(COMPILE_FROM)
def _replay(
    steps: Ints, make_ptr: Ints, make_ids: Ints, read_ptr: Ints, read_ids: Ints,
    size: Ints, producer: Ints, kept: Bools, memory: Ints, left: Ints, held: Ints, initial: int,
) -> int:  # fmt: skip
    """Fills `held`; returns the first step that reads what is not there, or -1."""
    done = np.zeros(len(memory), np.bool_)
    level = initial
    for k in range(len(steps)):
        task = steps[k]
        for at in range(read_ptr[task], read_ptr[task + 1]):
            maker = producer[read_ids[at]]
            if maker >= 0 and not done[maker]:
                return k
        for at in range(make_ptr[task], make_ptr[task + 1]):
            level += size[make_ids[at]]
        held[k] = level + memory[task]
        for at in range(make_ptr[task], make_ptr[task + 1]):
            item = make_ids[at]
            if left[item] == 0 and not kept[item]:
                level -= size[item]
        for at in range(read_ptr[task], read_ptr[task + 1]):
            item = read_ids[at]
            left[item] -= 1
            if left[item] == 0 and not kept[item]:
                level -= size[item]
        done[task] = True
    return -1


def judge_parallel(graph: TaskGraph, runs: Sequence[Run], *, processors: float, memory_bytes: int | None = None) -> ParallelProfile:
    """Replay a parallel schedule: every task once, after those it reads from, never more processors or memory than there are."""
    listed = sorted(runs, key=lambda r: r.start)  # stable: at equal starts the order given stands
    _check_complete(graph, np.array([r.task for r in listed], np.int64))
    events = _Events(graph, processors, memory_bytes, _SLACK * max((r.stop for r in listed), default=0.0))
    for position, run in enumerate(listed):
        events.start(position, run)
    events.finish(float("inf"))
    return ParallelProfile(
        makespan=max((r.stop for r in listed), default=0.0),
        peak_bytes=events.peak,
        times=tuple(events.times),
        bytes_held=tuple(events.levels),
    )


class _Events:
    """The state of a parallel replay."""

    def __init__(self, graph: TaskGraph, processors: float, limit: int | None, slack: float) -> None:
        self.graph, self.processors, self.limit, self.slack = graph, processors, limit, slack
        self.left = graph.readers.counts.tolist()
        self.size, self.kept, self.producer = graph.item_bytes.tolist(), graph.item_kept.tolist(), graph.item_producer.tolist()
        self.memory, self.time = graph.memory_bytes.tolist(), graph.time.tolist()
        self.make_ptr, self.make_ids = graph.makes.ptr.tolist(), graph.makes.ids.tolist()
        self.read_ptr, self.read_ids = graph.reads.ptr.tolist(), graph.reads.ids.tolist()
        self.done = bytearray(graph.num_tasks)
        self.running: list[tuple[float, int, Run]] = []
        self.busy = 0.0
        self.held = self.peak = graph.initial_bytes
        self.times: list[float] = [0.0]
        self.levels: list[int] = [self.held]

    def start(self, position: int, run: Run) -> None:
        self.finish(run.start)
        name = self.graph.names[run.task]
        expected = self.time[run.task] / run.processors if run.processors > 0 else float("inf")
        if run.start < 0 or abs(run.stop - run.start - expected) > self.slack:
            raise IllegalSchedule(
                position, f"task {name!r} runs from {run.start} to {run.stop}, but takes {expected} on {run.processors} processors."
            )
        for at in range(self.read_ptr[run.task], self.read_ptr[run.task + 1]):
            maker = self.producer[self.read_ids[at]]
            if maker >= 0 and not self.done[maker]:
                raise IllegalSchedule(position, f"task {name!r} starts at {run.start}, before {self.graph.names[maker]!r} has ended.")
        self.busy += run.processors
        if self.busy > self.processors * (1 + _SLACK):
            raise IllegalSchedule(position, f"with task {name!r}, {self.busy} processors are in use of {self.processors}.")
        made = sum(self.size[self.make_ids[at]] for at in range(self.make_ptr[run.task], self.make_ptr[run.task + 1]))
        self._change(run.start, made + self.memory[run.task])
        if self.limit is not None and self.held > self.limit:
            raise IllegalSchedule(
                position,
                f"with task {name!r} at {run.start} memory holds {format_bytes(self.held)} ({self.held} bytes), "
                f"{self.held - self.limit} more than its {format_bytes(self.limit)}.",
            )
        heapq.heappush(self.running, (run.stop, position, run))

    def finish(self, until: float) -> None:
        while self.running and self.running[0][0] <= until + self.slack:
            stop, _, run = heapq.heappop(self.running)
            task = run.task
            freed = self.memory[task]
            for at in range(self.make_ptr[task], self.make_ptr[task + 1]):
                item = self.make_ids[at]
                freed += self.size[item] if self.left[item] == 0 and not self.kept[item] else 0
            for at in range(self.read_ptr[task], self.read_ptr[task + 1]):
                item = self.read_ids[at]
                self.left[item] -= 1
                freed += self.size[item] if self.left[item] == 0 and not self.kept[item] else 0
            self.done[task] = 1
            self.busy -= run.processors
            self._change(min(stop, until), -freed)

    def _change(self, at: float, delta: int) -> None:
        self.held += delta
        self.peak = max(self.peak, self.held)
        if at > self.times[-1]:
            self.times.append(at)
            self.levels.append(self.held)
        else:
            self.levels[-1] = self.held


@dataclass(frozen=True, slots=True)
class Transfer:
    """Before step `step` of an order, move `size_bytes` of an item out of memory (`out`) or back into it."""

    step: int
    item: int
    size_bytes: int
    out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillPlan:
    """An order with its transfers. `written_bytes` is the I/O volume of the literature; what is read back comes on top."""

    order: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    written_bytes: int
    read_bytes: int
    peak_bytes: int


def judge_spill(graph: TaskGraph, plan: SpillPlan, *, memory_bytes: int) -> int:
    """Replay a spill plan: returns the bytes written, refuses one that overflows or reads what is not in memory."""
    size = graph.item_bytes.tolist()
    inside = [size[k] if p < 0 else 0 for k, p in enumerate(graph.item_producer.tolist())]
    disk, done = [0] * len(size), set[int]()
    pending = list(plan.transfers[::-1])
    for step, task in enumerate(plan.order):
        while pending and pending[-1].step == step:
            _transfer(pending.pop(), size, inside, disk)
        for item in graph.reads.of(task):
            producer = int(graph.item_producer[item])
            if inside[item] != size[item] or (producer >= 0 and producer not in done):
                raise IllegalSchedule(step, f"task {graph.names[task]!r} reads item {item}, of which {inside[item]} bytes are in memory.")
        for item in graph.makes.of(task):
            inside[item] = size[item]
        total = sum(inside) + int(graph.memory_bytes[task])
        if total > memory_bytes:
            raise IllegalSchedule(step, f"task {graph.names[task]!r} runs with {total} bytes, more than {memory_bytes}.")
        done.add(task)
        for item in (*graph.reads.of(task), *graph.makes.of(task)):
            if not graph.item_kept[item] and all(r in done for r in graph.readers.of(item)):
                inside[item] = 0
    return sum(disk)


def _transfer(move: Transfer, size: list[int], inside: list[int], disk: list[int]) -> None:
    inside[move.item] += -move.size_bytes if move.out else move.size_bytes
    if not 0 <= inside[move.item] <= size[move.item]:
        raise IllegalSchedule(move.step, f"item {move.item} has {inside[move.item]} of its {size[move.item]} bytes in memory.")
    disk[move.item] = max(disk[move.item], size[move.item] - inside[move.item])
