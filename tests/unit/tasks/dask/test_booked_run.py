"""The booked run against workers made of dictionaries, which count every byte and die at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from memfit.core import InfeasibleBudget, NoPlanFound
from memfit.tasks import judge_order, schedule, task_graph
from memfit.tasks.dask.booked_run import BookedRun, Workers
from memfit.tasks.dask.worker import Call, InputLost
from memfit.tasks.graph import TaskGraph


class Toy(Workers):
    """Values are numbers; `held` counts outputs, working memory and copies over all workers alive, and must never exceed `limit`."""

    def __init__(self, graph: TaskGraph, limit: int, rng: random.Random, death: float = 0.0) -> None:
        self.graph, self.limit, self.rng, self.death = graph, limit, rng, death
        self.stores: dict[str, dict[str, tuple[int, int]]] = {"w0": {}, "w1": {}}  # worker -> key -> (value, bytes)
        self.running: dict[int, tuple[str, str, Call, list[tuple[str, str]], int]] = {}
        self.known: set[str] = set()
        self.peak = self.deaths = self.moves = 0
        self.born = 2

    def _count(self) -> None:
        held = sum(size for store in self.stores.values() for _, size in store.values()) + sum(r[4] for r in self.running.values())
        assert held <= self.limit, f"{held} bytes of {self.limit}"
        self.peak = max(self.peak, held)

    def threads(self) -> dict[str, int]:
        return dict.fromkeys(self.stores, 1)

    def start(self, task: int, key: str, call: Call, sources: list[tuple[str, str]], address: str) -> None:
        copies = sum(self.stores.get(a, {}).get(k, (0, 0))[1] for k, a in sources if a != address)
        need = int(self.graph.memory_bytes[task] + self.graph.output_bytes[task])
        self.running[task] = (address, key, call, sources, need + copies)
        self._count()

    def wait(self, timeout_s: float) -> list[tuple[int, str, int | None]]:
        if self.rng.random() < self.death and self.deaths < 6:
            self._kill(self.rng.choice(sorted(self.stores)))
        alive = [t for t, r in self.running.items() if r[0] in self.stores]
        if not alive:
            return []
        task = self.rng.choice(alive)
        address, key, call, sources, _ = self.running.pop(task)
        if any(a not in self.stores or k not in self.stores[a] for k, a in sources):
            return [(task, address, None)]
        value = call(*(self.stores[a][k][0] for k, a in sources))
        size = int(self.graph.output_bytes[task])
        self.stores[address][key] = (value, size)
        self._count()
        return [(task, address, size)]

    def _kill(self, address: str) -> None:
        self.deaths += 1
        del self.stores[address]
        self.stores[f"w{self.born}"] = {}  # as a nanny does: a new worker at a new address
        self.born += 1

    def abandon(self, address: str) -> list[int]:
        lost = [t for t, r in self.running.items() if r[0] == address]
        for task in lost:
            del self.running[task]
        return lost

    def discard(self, keys: Mapping[str, list[str]]) -> None:
        for address, mine in keys.items():
            for key in mine:
                self.stores.get(address, {}).pop(key, None)

    def take(self, key: str, address: str) -> Any:
        if key not in self.stores.get(address, {}):
            raise InputLost(key)
        return self.stores[address][key][0]

    def move(self, key: str, source: str, target: str) -> None:
        if key not in self.stores.get(source, {}) or target not in self.stores:
            raise InputLost(key)
        self.moves += 1
        value = self.stores[source].pop(key)
        if self.rng.random() < self.death and self.deaths < 6:
            self._kill(target)  # half-way: the value is nowhere, and the worker that had it lives
            raise InputLost(key)
        self.stores[target][key] = value


def _case(rng: random.Random) -> tuple[TaskGraph, list[list[int]], list[Call], list[int]]:
    """A random graph whose tasks add up what they read, plus one; and the values that must come out."""
    size = rng.randint(1, 18)
    edges = [(a, b) for a in range(size) for b in range(a + 1, size) if rng.random() < 2 / size]
    graph = task_graph(
        output_bytes=[rng.randint(0, 20) for _ in range(size)], memory_bytes=[rng.randint(0, 5) for _ in range(size)], edges=edges
    )
    inputs = [sorted(graph.predecessors.of(t)) for t in range(size)]
    calls = [Call(lambda values: 1 + sum(values.values()), mine) for mine in inputs]
    values: list[int] = []
    for mine in inputs:
        values.append(1 + sum(values[s] for s in mine))
    return graph, inputs, calls, values


@pytest.mark.parametrize("death", [0.0, 0.15])
def test_right_and_inside_whatever_dies(death: float) -> None:
    restarts = moves = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph, inputs, calls, values = _case(rng)
        outcome = schedule(graph, time_limit_s=0.05)
        limit = int((outcome.peak_bytes or 0) * rng.choice((1.0, 1.3, 2.0)))
        workers = Toy(graph, limit, rng, death)
        run = BookedRun(graph, outcome.order, limit, 2, calls, inputs, workers, look_every_s=0)
        ends = [t for t in range(graph.num_tasks) if not graph.successors.of(t)]
        assert run.run(ends) == [values[t] for t in ends]
        assert workers.peak <= limit
        assert run.peak_bytes <= limit
        restarts += run.restarts
        moves += workers.moves
    assert (restarts > 10) == (death > 0)
    assert moves > 0  # at the sequential peak copies do not fit: inputs are brought together


def test_too_little_memory_is_refused_before_anything_runs() -> None:
    graph, inputs, calls, _ = _case(random.Random(3))
    peak = judge_order(graph, graph.topological_order).peak_bytes
    with pytest.raises(InfeasibleBudget, match=str(peak)):
        BookedRun(graph, graph.topological_order.tolist(), peak - 1, 2, calls, inputs, Toy(graph, peak, random.Random(0)))


def test_workers_that_never_stop_dying_end_the_run() -> None:
    graph, inputs, calls, _ = _case(random.Random(8))
    workers = Toy(graph, 10**6, random.Random(0), death=1.0)
    workers.deaths = -(10**6)
    run = BookedRun(graph, graph.topological_order.tolist(), 10**6, 2, calls, inputs, workers, look_every_s=0)
    with pytest.raises(NoPlanFound, match="find out why they die"):
        run.run([graph.num_tasks - 1])
