"""MemBooking (Aupy, Brasseur, Marchal 2017): P processors on a tree, memory never above M, and never stuck.

    activation order  a b c d e ...   a sequential order whose peak is at most M (Liu's)
    booked            what an activated task has been promised; a task may start only when it is active and ready

When task j ends, its booking is not simply given back: its output goes to the booking of its parent, and the rest climbs
to the ancestors that will need it anyway. So a parent is often fully booked by what its children leave, the next
activation costs little, and independent subtrees are activated early: parallelism without overflowing.
"""

from __future__ import annotations

import heapq

from memfit.core.errors import InfeasibleBudget
from memfit.core.units import format_bytes
from memfit.tasks.graph import Floats, Ints
from memfit.tasks.judge import Run
from memfit.tasks.trees.tree import Tree

_UNSET = -1


def membooking(tree: Tree, processors: int, memory_bytes: int, activation: Ints, peak_bytes: int) -> list[Run]:
    """Runs within `memory_bytes`. `activation` is an order of the tasks with peak `peak_bytes`; priority is the longest path."""
    if peak_bytes > memory_bytes:
        raise InfeasibleBudget(
            f"{format_bytes(memory_bytes)} is below {format_bytes(peak_bytes)} ({peak_bytes} bytes), the peak of the sequential order "
            "that MemBooking follows: give it at least that.",
            minimum_bytes=peak_bytes,
        )
    booking = Booking(tree, activation, memory_bytes)
    priority = _paths_to_root(tree)
    runs: list[Run] = []
    running: list[tuple[float, int, int]] = []
    ready: list[tuple[float, int]] = []
    now = 0.0
    while len(runs) < tree.num_tasks:
        for task in booking.activate():
            heapq.heappush(ready, (-float(priority[task]), task))
        while ready and len(running) < processors:
            _, task = heapq.heappop(ready)
            stop = now + float(tree.time[task])
            runs.append(Run(task, now, stop))
            heapq.heappush(running, (stop, len(runs), task))
        now = running[0][0]
        while running and running[0][0] <= now:
            for task in booking.complete(heapq.heappop(running)[2]):
                heapq.heappush(ready, (-float(priority[task]), task))
    return runs


def _paths_to_root(tree: Tree) -> Floats:
    longest = tree.time.copy()
    for node in tree.postorder[::-1].tolist():
        if tree.parent[node] >= 0:
            longest[node] += longest[tree.parent[node]]
    return longest


class Booking:
    """Who may start: the state of MemBooking, driven by completions. Used by the planner above and by engines at run time."""

    def __init__(self, tree: Tree, activation: Ints, memory_bytes: int) -> None:
        n = tree.num_nodes
        self.parent, self.output, self.need = tree.parent.tolist(), tree.output_bytes.tolist(), tree.need_bytes.tolist()
        self.children = tree.children
        self.limit = memory_bytes - tree.base_bytes
        self.num_tasks = tree.num_tasks
        self.booked = [0] * n
        self.sub = [_UNSET] * n  # bytes booked in the subtree, once somebody looked
        self.missing = tree.children.counts.tolist()  # children that have not ended
        self.active = bytearray(n)
        self.total = 0
        self.order = [*activation.tolist(), *range(tree.num_tasks, n)]
        self.next = 0

    def activate(self) -> list[int]:
        """Book the next tasks of the activation order while they fit; returns those that may start at once."""
        started = []
        while self.next < len(self.order):
            task = self.order[self.next]
            if self.sub[task] == _UNSET:
                self.sub[task] = self.booked[task] + sum(self.sub[c] for c in self.children.of(task))
            missing = max(0, self.need[task] - self.sub[task])
            if self.total + missing > self.limit:
                break
            self.total += missing
            self.booked[task] += missing
            self.sub[task] += missing
            self.active[task] = 1
            self.next += 1
            if self.missing[task] == 0:
                started.append(task)
        return [t for t in started if t < self.num_tasks]

    def complete(self, task: int) -> list[int]:
        """Pass the booking of an ended task on; returns the parent if it may start now."""
        self.total -= self.booked[task]
        left = self.booked[task] - self.output[task]
        self.booked[task] = 0
        parent = self.parent[task]
        if parent < 0:
            return []
        self.booked[parent] += self.output[task]
        self.total += self.output[task]
        self.sub[task] = 0
        ancestor = parent
        while left > 0 and ancestor >= 0 and self.sub[ancestor] != _UNSET:
            keep = min(left, max(0, self.need[ancestor] - (self.sub[ancestor] - left)))
            self.booked[ancestor] += keep
            self.total += keep
            self.sub[ancestor] -= left - keep
            left -= keep
            ancestor = self.parent[ancestor]
        self.missing[parent] -= 1
        ready = self.missing[parent] == 0 and self.active[parent] and parent < self.num_tasks
        return [parent] if ready else []
