"""Dask for real: LocalClusters whose workers write down every byte they hold, and workers that are killed half-way."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("distributed")

import dask.array as da
import dask.bag as db
import numpy as np
from dask import delayed
from distributed import Client, LocalCluster
from tests.integration.dask_ledger import clear_ledger, combine, peak_of, read_ledger

from memfit.core import BadInput, InfeasibleBudget, Unsupported
from memfit.tasks import schedule
from memfit.tasks.dask.collections import compute, measure, workload


def _connect(num_workers: int) -> Iterator[Client]:
    with (
        LocalCluster(n_workers=num_workers, threads_per_worker=1, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def one() -> Iterator[Client]:
    yield from _connect(1)


@pytest.fixture(scope="module")
def two() -> Iterator[Client]:
    yield from _connect(2)


def _tree(seed: int, size: int = 24, seconds: float = 0.002) -> tuple[Any, dict[str, int]]:
    """A reduction tree of blocks; the value of its root counts its nodes."""
    rng = random.Random(seed)
    parent = [-1] + [rng.randrange(max(0, i - 5), i) for i in range(1, size)]
    return _blocks(
        [[j for j in range(size) if parent[j] == i] for i in range(size)], [rng.randint(1, 40) * 1000 for _ in range(size)], seconds
    )


def _blocks(inputs: list[list[int]], sizes: list[int], seconds: float) -> tuple[Any, dict[str, int]]:
    made: dict[int, Any] = {}
    for task in reversed(range(len(inputs))):
        made[task] = delayed(combine)(sizes[task], seconds, *(made[j] for j in inputs[task]), dask_key_name=f"block-{task}")
    return made[0], {f"block-{task}": size for task, size in enumerate(sizes)}


def _measured(client: Client, call: Callable[[], Any]) -> tuple[Any, int]:
    client.run(clear_ledger)
    answer = call()
    return answer, peak_of(list(client.run(read_ledger).values()))


@pytest.mark.parametrize("seed", [0, 1])
def test_precedence_edges_hold_the_planned_peak_exactly(one: Client, seed: int) -> None:
    root, sizes = _tree(seed)
    done, peak = _measured(one, lambda: compute(root, client=one, sizes=sizes))
    assert (done.mode, done.values.value) == ("edges", 24)
    assert peak == done.outcome.peak_bytes == done.outcome.lower_bound_bytes
    plain, default = _measured(one, root.compute)
    assert plain.value == 24
    assert default >= peak


@pytest.mark.parametrize("factor", [1.0, 1.4, 3.0])
def test_two_workers_never_exceed_the_bound_together(two: Client, factor: float) -> None:
    root, sizes = _tree(2)
    least = schedule(workload(root, sizes=sizes).graph).peak_bytes
    assert least is not None
    done, peak = _measured(two, lambda: compute(root, client=two, memory=int(least * factor), sizes=sizes))
    assert (done.mode, done.values.value) == ("booked", 24)
    assert peak <= int(least * factor)
    assert done.peak_booked_bytes <= int(least * factor)
    if factor > 2:
        assert peak > least  # memory that is there is used


def test_a_dag_with_shared_outputs_on_two_workers(two: Client) -> None:
    rng = random.Random(5)
    inputs = [sorted(rng.sample(range(i + 1, min(i + 7, 30)), k=min(2, 29 - i))) if i < 29 else [] for i in range(30)]
    root, sizes = _blocks(inputs, [rng.randint(1, 9) * 1000 for _ in range(30)], 0.002)
    least = schedule(workload(root, sizes=sizes).graph, time_limit_s=1).peak_bytes
    assert least is not None
    done, peak = _measured(two, lambda: compute(root, client=two, memory=least, sizes=sizes, time_limit_s=1))
    assert peak <= least
    assert done.values.value == root.compute(scheduler="sync").value


def test_spilling_when_the_best_order_does_not_fit(one: Client) -> None:
    # two branches that each climb to 50 kB and leave 30 kB: 90 kB together, 60 kB for the largest task
    root, sizes = _blocks([[1, 3], [2], [], [4], []], [1000, 30_000, 20_000, 30_000, 40_000], 0.002)
    least = schedule(workload(root, sizes=sizes).graph).peak_bytes
    assert least is not None
    need = int(workload(root, sizes=sizes).graph.need_bytes.max())
    assert need < least
    done, peak = _measured(one, lambda: compute(root, client=one, memory=need, sizes=sizes))
    assert (done.mode, done.values.value) == ("edges+spill", 5)
    assert done.written_bytes > 0
    assert peak <= need < least
    with pytest.raises(InfeasibleBudget, match="spilling cannot help"):
        compute(root, client=one, memory=need - 1, sizes=sizes)


def _kill_one(client: Client, after_s: float) -> threading.Thread:
    """SIGKILL, as the kernel does it: no goodbye."""
    victim = sorted(client.run(os.getpid).items())[0][1]

    def act() -> None:
        time.sleep(after_s)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_killed_worker_on_precedence_edges_is_survived_within_the_bound() -> None:
    for client in _connect(1):
        root, sizes = _tree(3, seconds=0.05)
        killer = _kill_one(client, 0.7)
        done = compute(root, client=client, sizes=sizes)
        killer.join()
        assert (done.values.value, done.restarts) == (24, 1)
        assert peak_of(list(client.run(read_ledger).values())) <= (done.outcome.peak_bytes or 0)  # of the worker that came after


def test_a_killed_worker_of_two_is_survived_within_the_bound() -> None:
    for client in _connect(2):
        root, sizes = _tree(4, size=30, seconds=0.08)
        least = schedule(workload(root, sizes=sizes).graph).peak_bytes
        assert least is not None
        killer = _kill_one(client, 0.8)
        done = compute(root, client=client, memory=int(1.2 * least), sizes=sizes)
        killer.join()
        assert done.values.value == 30
        assert done.restarts >= 1
        assert done.peak_booked_bytes <= int(1.2 * least)
        assert peak_of(list(client.run(read_ledger).values())) <= int(1.2 * least)


def test_arrays_bags_and_several_collections_give_the_same_answers(two: Client) -> None:
    array = da.random.default_rng(3).random((200, 200), chunks=(50, 50))
    total, turned = (array + array.T).sum(axis=0), array.T[:3]
    bag = db.from_sequence(range(100), npartitions=5).map(lambda x: x * 2)
    expected = da.compute(total, turned, bag)
    for options in ({}, {"memory": "50MB"}, {"memory": "50MB", "processors": 2}):
        answer = compute(total, turned, bag, client=two, time_limit_s=0.3, **options).values
        np.testing.assert_allclose(answer[0], expected[0])
        np.testing.assert_allclose(answer[1], expected[1])
        assert answer[2] == expected[2]


def test_a_sampling_run_measures_one_task_of_each_kind() -> None:
    array = da.ones((400, 400), chunks=(100, 100)).rechunk((50, 400)) + 1
    every, sample = measure(array, per_group=None), measure(array)
    assert set(every.output_bytes) == set(sample.output_bytes)
    assert max(sample.output_bytes.values()) >= 50 * 400 * 8
    assert all(sample.output_bytes[k] >= 0.5 * size for k, size in every.output_bytes.items())
    assert max(sample.memory_bytes.values()) > 0


def test_errors_of_tasks_and_wrong_input_reach_the_caller(two: Client) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError("from the task")

    broken = delayed(fail)(delayed(int)(3))
    for options in ({}, {"memory": "1MB", "processors": 2}):
        with pytest.raises(ZeroDivisionError, match="from the task"):
            compute(broken, client=two, sizes=dict.fromkeys(workload_keys(broken), 8), **options)
    with pytest.raises(BadInput, match="collections are expected"):
        workload(3)
    with pytest.raises(BadInput, match="no size is given"):
        workload(broken, sizes={})
    with pytest.raises(Unsupported, match=r"array\.rechunk\.method"):
        workload(da.ones((40, 40), chunks=(40, 4)).rechunk((4, 40), method="p2p"))


def workload_keys(collection: Any) -> list[Any]:
    return list(collection.__dask_graph__())
