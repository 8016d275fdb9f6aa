"""Running a task graph on workers that come and go, never holding more than the bound: SafeBooking at run time.

    loop   start what may start (most local worker first) ── wait for an end ── discard what nobody reads any more, then book it free
    lost   drain what runs, see which values are gone, and plan the rest again: values that survive are kept when that is safe,
           else everything starts over, which the bound always allows

Knows no engine: `Workers` is what it asks of one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.core.units import format_bytes
from memfit.tasks.dask.worker import Call, InputLost
from memfit.tasks.graph import TaskGraph
from memfit.tasks.parallel.safe_booking import SafeBooking
from memfit.tasks.remaining_graph import restrict

_POLL_S = 0.25
_LOOKAHEAD = 64
_MOST_RESTARTS = 50
_PATIENCE = 240  # polls without any worker before giving up


class Workers(ABC):
    """An engine's workers, by address."""

    known: set[str]

    @abstractmethod
    def threads(self) -> dict[str, int]:
        """Workers alive now and how many tasks each can run."""

    @abstractmethod
    def start(self, task: int, key: str, call: Call, sources: list[tuple[str, str]], address: str) -> None:
        """Run a task on a worker; its inputs lie at (key, address)."""

    @abstractmethod
    def wait(self, timeout_s: float) -> list[tuple[int, str, int | None]]:
        """Tasks that ended: (task, worker, bytes of its output, or None when an input was lost)."""

    @abstractmethod
    def abandon(self, address: str) -> list[int]:
        """Forget what runs on a worker that is lost; returns those tasks."""

    @abstractmethod
    def discard(self, keys: Mapping[str, list[str]]) -> None:
        """Drop values now: worker -> keys."""

    @abstractmethod
    def take(self, key: str, address: str) -> Any:
        """A value, to the caller. Raises InputLost when its worker is gone, like `move`."""

    @abstractmethod
    def move(self, key: str, source: str, target: str) -> None:
        """Move a value without holding it twice."""


class BookedRun:
    """One run. Tasks and items carry the ids of the full graph; `part` is what is left to do since the last loss."""

    def __init__(
        self, graph: TaskGraph, order: Sequence[int], memory_bytes: int, processors: int, calls: Sequence[Call],
        inputs: Sequence[Sequence[int]], workers: Workers, look_every_s: float = 0.5,
    ) -> None:  # fmt: skip
        self.graph, self.order, self.limit, self.processors = graph, list(order), memory_bytes, processors
        self.calls, self.inputs, self.workers = calls, inputs, workers
        self.where: dict[int, str] = {}  # task -> worker that holds its output
        self.done: set[int] = set()
        self.running: dict[int, tuple[str, int]] = {}  # task -> (worker, bytes of copies)
        self.oversized: set[int] = set()
        self.attempt: dict[int, int] = {}
        self.peak_bytes = self.restarts = 0
        self.litter: dict[str, list[str]] = {}  # worker -> keys that nobody reads any more
        self.litter_bytes = 0
        self.looked_at, self.look_every_s = time.monotonic(), look_every_s
        self.alive = workers.threads()
        workers.known = set(self.alive)
        self._plan(range(graph.num_tasks), ())

    def name(self, task: int) -> str:
        return f"task-{task}-{self.attempt.get(task, 0)}"

    def run(self, results: Sequence[int]) -> list[Any]:
        """Run everything; returns the values of `results`."""
        while True:
            while len(self.done) < self.graph.num_tasks:
                self._check_workers()
                self._start_some()
                if not self.running:
                    self._force_next()
                self._collect()
            try:
                return [self.workers.take(self.name(t), self.where[t]) for t in results]
            except InputLost:
                self._repair(self.workers.known - set(self.workers.threads()))

    def _collect(self) -> None:
        ended = self.workers.wait(_POLL_S)
        broken = False
        for task, address, size in ended:
            if size is None:
                self.running.pop(task)
                broken = True
            else:
                self._handle_end(task, address, size)
        if broken:
            self._repair(self.workers.known - set(self.workers.threads()))

    # -- planning ----------------------------------------------------------------------------------------------------

    def _plan(self, todo: Sequence[int] | range, present: Sequence[int]) -> None:
        part, tasks, items = restrict(self.graph, list(todo), set(present))
        self.tasks, self.items = tasks.tolist(), items.tolist()
        self.local = {task: k for k, task in enumerate(self.tasks)}
        order = np.array([self.local[t] for t in self.order if t in self.local], np.int64)
        self.booking = SafeBooking(part, order, self.limit)
        self.part = part
        self.missing = part.predecessors.counts.tolist()
        self.position = self.booking.position.tolist()
        self.ready = sorted((k for k in range(part.num_tasks) if not self.missing[k]), key=self.position.__getitem__)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start_some(self) -> None:
        refused = 0
        free = self._free_slots()
        for k in list(self.ready):
            if refused >= _LOOKAHEAD or not free or len(self.running) >= self.processors:
                return
            address, extra = self._best_worker(self.tasks[k], free)
            if self._may_start(k, extra):
                self._start(k, address, extra)
                free = self._free_slots()
            else:
                refused += 1

    def _may_start(self, k: int, extra: int) -> bool:
        """Values that nobody reads any more count while they lie on a worker; where they are in the way they are discarded first."""
        if self.booking.may_start(k, extra + self.litter_bytes):
            return True
        if not self.litter or not self.booking.may_start(k, extra):
            return False
        self._discard_litter()
        return True

    def _discard_litter(self) -> None:
        self.workers.discard({a: keys for a, keys in self.litter.items() if a in self.workers.known})
        self.litter, self.litter_bytes = {}, 0

    def _free_slots(self) -> dict[str, int]:
        slots = {a: n for a, n in self.alive.items() if a in self.workers.known}
        for address, _ in self.running.values():
            slots[address] = slots.get(address, 0) - 1
        return {a: n for a, n in slots.items() if n > 0}

    def _best_worker(self, task: int, free: Mapping[str, int]) -> tuple[str, int]:
        """The free worker that must copy least, and how many bytes that is."""
        size = self.graph.output_bytes
        away = {a: sum(int(size[s]) for s in self.inputs[task] if self.where[s] != a) for a in free}
        address = min(away, key=lambda a: (away[a], -free[a], a))
        return address, away[address]

    def _start(self, k: int, address: str, extra: int) -> None:
        task = self.tasks[k]
        self.booking.start(k, extra)
        self.ready.remove(k)
        self.running[task] = (address, extra)
        self.peak_bytes = max(self.peak_bytes, self.booking.held + self.litter_bytes)
        sources = [(self.name(s), self.where[s]) for s in self.inputs[task]]
        self.workers.start(task, self.name(task), self.calls[task], sources, address)

    def _force_next(self) -> None:
        """For when nothing runs and nothing may start: only copies of inputs are in the way, so the next task's inputs are moved to one worker."""
        for _ in range(_PATIENCE):
            if self._free_slots():
                break
            self.workers.wait(_POLL_S)
            self._check_workers()
        else:
            raise NoPlanFound("no worker is left to run on, and none came back within a minute: start workers and run again.")
        self._discard_litter()
        k = self.booking.order[self.booking.first]
        address, _ = self._best_worker(self.tasks[k], self._free_slots())
        for source in self.inputs[self.tasks[k]]:
            if self.where[source] != address:
                try:
                    self.workers.move(self.name(source), self.where[source], address)
                except InputLost:  # it may have left the one and not have reached the other
                    self._drop([source])
                    return self._repair(self.workers.known - set(self.workers.threads()))
                self.where[source] = address
        if not self.booking.may_start(k):
            need = self.booking.held + self.booking.adds[k]
            raise NoPlanFound(
                f"task {self.graph.names[self.tasks[k]]} would hold {format_bytes(need)}, more than {format_bytes(self.limit)}: "
                f"{len(self.oversized)} outputs are larger than their planned sizes; measure again with per_group=None."
            )
        return self._start(k, address, 0)

    # -- ending ------------------------------------------------------------------------------------------------------

    def _handle_end(self, task: int, address: str, size: int) -> None:
        _, extra = self.running.pop(task)
        k = self.local[task]
        self.where[task] = address
        self.done.add(task)
        planned = int(self.graph.output_bytes[task])
        if size > planned:
            self.oversized.add(task)
        for item in self.booking.complete(k, extra):
            producer = int(self.graph.item_producer[self.items[item]])
            self.litter.setdefault(self.where.pop(producer), []).append(self.name(producer))
            self.litter_bytes += int(self.graph.output_bytes[producer])
        for s in self.part.successors.of(k):
            self.missing[s] -= 1
            if not self.missing[s]:
                self.ready.append(s)
        self.ready.sort(key=self.position.__getitem__)

    # -- losing workers ----------------------------------------------------------------------------------------------

    def _check_workers(self) -> None:
        if time.monotonic() - self.looked_at < self.look_every_s and self.running:
            return
        self.looked_at = time.monotonic()
        self.alive = self.workers.threads()
        lost = self.workers.known - set(self.alive)
        self.workers.known |= set(self.alive)
        if lost:
            self._repair(lost)

    def _repair(self, lost: set[str]) -> None:
        """Drain, then plan what is left from the values that survive."""
        self.restarts += 1
        if self.restarts > _MOST_RESTARTS:
            raise NoPlanFound(
                f"workers were lost {self.restarts} times during this run: find out why they die (memory outside the tasks?)."
            )
        while True:
            self.workers.known -= lost
            for address in lost:
                for task in self.workers.abandon(address):
                    self.running.pop(task, None)
            if not self.running:
                break
            for task, address, size in self.workers.wait(_POLL_S):
                self.running.pop(task, None)
                if size is not None:
                    self.where[task] = address
                    self.done.add(task)
            lost = self.workers.known - set(self.workers.threads())
        self.alive = self.workers.threads()
        self._discard_litter()
        self.where = {task: a for task, a in self.where.items() if a in self.alive}
        todo = self._list_todo()
        useful = {s for t in todo for s in self.inputs[t] if s not in todo} | {t for t in self.where if self.graph.item_kept[t]} - todo
        try:
            self._plan(sorted(todo), sorted(useful))
        except InfeasibleBudget:
            todo, useful = set(range(self.graph.num_tasks)), set()
            self._plan(sorted(todo), ())
        self._drop([t for t in list(self.where) if t not in useful])
        self.done = set(range(self.graph.num_tasks)) - todo
        for task in todo:
            self.attempt[task] = self.attempt.get(task, 0) + 1

    def _list_todo(self) -> set[int]:
        """Tasks not done, tasks whose kept output is gone, and what must run again to feed them."""
        kept = self.graph.item_kept
        stack = [t for t in range(self.graph.num_tasks) if t not in self.done or (kept[t] and t not in self.where)]
        todo: set[int] = set()
        while stack:
            task = stack.pop()
            if task not in todo:
                todo.add(task)
                stack += [s for s in self.inputs[task] if s not in self.where]
        return todo

    def _drop(self, tasks: Sequence[int]) -> None:
        gone: dict[str, list[str]] = {}
        for task in tasks:
            gone.setdefault(self.where.pop(task), []).append(self.name(task))
        self.workers.discard(gone)
