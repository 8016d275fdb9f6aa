"""SafeBooking: P processors on any DAG, memory never above M, and never stuck: the banker's algorithm on a planned order.

    planned order   a b c d e f          its peak is at most M, so "one by one, as planned" is always a way out
    running           b   d              start f early? only if it fits now, and if afterwards the rest (a c e), one by
                                         one as planned, would still fit with f's output lying there: a safe state

`load[k]` is what running the k-th task of the plan would hold once all started tasks have ended. Starting task j early
adds its outputs to the loads of the unstarted tasks before it and takes away inputs that now go earlier; later loads do
not change, because what is alive depends only on what is done. MemBooking does this for trees without looking at the whole
rest; this one works on any graph and books no more than needed, for O(n) a decision.
"""

from __future__ import annotations

import heapq

import numpy as np

from memfit.core.errors import InfeasibleBudget
from memfit.core.units import format_bytes
from memfit.tasks.bounds import path_times
from memfit.tasks.graph import Floats, Ints, TaskGraph
from memfit.tasks.judge import Run, judge_order

_STARTED = np.int64(-(1 << 62))
_LOOKAHEADS = (1, 6, 24)  # ready tasks that may refuse before a free processor waits


class SafeBooking:
    """Who may start, driven by starts and completions. The planner below and the engines at run time use it alike."""

    def __init__(self, graph: TaskGraph, order: Ints, memory_bytes: int) -> None:
        profile = judge_order(graph, order)
        if profile.peak_bytes > memory_bytes:
            raise InfeasibleBudget(
                f"{format_bytes(memory_bytes)} is below {format_bytes(profile.peak_bytes)} ({profile.peak_bytes} bytes), the peak of the "
                "sequential order that this follows: give it at least that, or let it spill.",
                minimum_bytes=profile.peak_bytes,
            )
        self.graph, self.limit = graph, memory_bytes
        self.load = profile.bytes_at_step.copy()
        self.position = np.empty(graph.num_tasks, np.int64)
        self.position[order] = np.arange(graph.num_tasks)
        self.order = order.tolist()
        self.first = 0  # no task before this position is unstarted
        self.held = graph.initial_bytes
        self.started = bytearray(graph.num_tasks)
        self.left = graph.readers.counts.tolist()  # readers of each item that have not ended
        self.size, self.kept = graph.item_bytes.tolist(), graph.item_kept.tolist()
        self.adds = (graph.memory_bytes + graph.output_bytes).tolist()
        self.memory = graph.memory_bytes.tolist()

    def may_start(self, task: int, extra_bytes: int = 0) -> bool:
        """Whether the task fits now and leaves a safe state; `extra_bytes` are needed while it runs (copies of inputs)."""
        if self.held + self.adds[task] + extra_bytes > self.limit:
            return False
        at = int(self.position[task])
        return at == self.first or int(self._loads_before(task, at).max()) <= self.limit

    def start(self, task: int, extra_bytes: int = 0) -> None:
        at = int(self.position[task])
        if at > self.first:
            self.load[self.first : at] = self._loads_before(task, at)
        self.load[at] = _STARTED
        self.started[task] = 1
        self.held += self.adds[task] + extra_bytes
        while self.first < len(self.order) and self.started[self.order[self.first]]:
            self.first += 1

    def complete(self, task: int, extra_bytes: int = 0) -> list[int]:
        """Free what the end of the task frees; returns the items that may go."""
        gone = [k for k in self.graph.makes.of(task) if self.left[k] == 0 and not self.kept[k]]
        for item in self.graph.reads.of(task):
            self.left[item] -= 1
            if self.left[item] == 0 and not self.kept[item]:
                gone.append(item)
        self.held -= self.memory[task] + extra_bytes + sum(self.size[k] for k in gone)
        return gone

    def _loads_before(self, task: int, at: int) -> Ints:
        """Loads of the positions [first, at) if the task ran now."""
        loads: Ints = self.load[self.first : at].copy()
        stays = sum(self.size[k] for k in self.graph.makes.of(task) if self.kept[k] or self.graph.readers.of(k))
        loads[loads > _STARTED] += stays
        for item in self.graph.reads.of(task):
            if not self.kept[item] and self.size[item]:
                others = [int(self.position[r]) for r in self.graph.readers.of(item) if r != task and not self.started[r]]
                last = max(others, default=-1)
                tail = loads[max(last + 1 - self.first, 0) :]
                tail[tail > _STARTED] -= self.size[item]
        return loads


def safebooking(graph: TaskGraph, processors: int, memory_bytes: int, order: Ints) -> list[Run]:
    """Runs within `memory_bytes`: the best of a few priorities. Keeping close to the plan works on what will free memory soon; looking
    further ahead, and the longest path first, are better when there is plenty of it."""
    planned = np.empty(graph.num_tasks)
    planned[order] = np.arange(graph.num_tasks)
    variants = [(planned, ahead) for ahead in _LOOKAHEADS] + [(-path_times(graph), _LOOKAHEADS[-1])]
    found = [_simulate(graph, processors, memory_bytes, order, key, ahead) for key, ahead in variants]
    return min(found, key=lambda runs: max((r.stop for r in runs), default=0.0))


def _simulate(graph: TaskGraph, processors: int, memory_bytes: int, order: Ints, priority: Floats, ahead: int) -> list[Run]:
    booking = SafeBooking(graph, order, memory_bytes)
    urgency = priority.tolist()
    missing, duration = graph.predecessors.counts.tolist(), graph.time.tolist()
    ready = [(urgency[t], t) for t in range(graph.num_tasks) if missing[t] == 0]
    heapq.heapify(ready)
    running: list[tuple[float, int, int]] = []
    runs: list[Run] = []
    now = 0.0
    while ready or running:
        for task in _choose(booking, ready, processors - len(running), missing, ahead):
            runs.append(Run(task, now, now + duration[task]))
            heapq.heappush(running, (now + duration[task], len(runs), task))
        now = running[0][0]
        while running and running[0][0] <= now:
            _, _, task = heapq.heappop(running)
            booking.complete(task)
            for s in graph.successors.of(task):
                missing[s] -= 1
                if missing[s] == 0:
                    heapq.heappush(ready, (urgency[s], s))
    return runs


def _choose(booking: SafeBooking, ready: list[tuple[float, int]], free: int, missing: list[int], ahead: int) -> list[int]:
    """Start what may start, most urgent first; the planned next task is always among those tried."""
    chosen: list[int] = []
    aside: list[tuple[float, int]] = []
    while ready and free > len(chosen) and len(aside) < ahead:
        entry = heapq.heappop(ready)
        if booking.started[entry[1]]:
            continue
        if booking.may_start(entry[1]):
            booking.start(entry[1])
            chosen.append(entry[1])
        else:
            aside.append(entry)
    for entry in aside:
        heapq.heappush(ready, entry)
    while free > len(chosen) and booking.first < len(booking.order):
        task = booking.order[booking.first]
        if missing[task] or not booking.may_start(task):
            break
        booking.start(task)  # its entry in `ready` is skipped when it comes up
        chosen.append(task)
    return chosen
