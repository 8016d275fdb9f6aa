"""Dask's own order against memfit's on eight real-shaped workloads: peak memory of the workers and wall time, both measured."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask.array as da
import numpy as np
from dask import delayed
from distributed import Client, LocalCluster

from benchmarks.lib.results import provenance, write_results
from memfit.tasks import assembly_tree, harpoon, random_dag, schedule
from memfit.tasks.dask.collections import Measured, compute, measure, workload
from memfit.tasks.graph import TaskGraph

MB = 10**6
PACKAGES = ("numpy", "dask", "distributed", "scipy", "pymetis")


def make(size_bytes: int, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of that size whose every page is written, and a little work on the inputs."""
    result = np.empty(max(size_bytes // 8, 1))
    result[:] = 1.0 + sum(float(x[:: max(len(x) // 4096, 1)].sum()) for x in inputs) * 1e-9
    return result


def from_graph(graph: TaskGraph, scale: float) -> tuple[Any, dict[str, int]]:
    """The tasks of a graph as delayed calls; all that nobody reads goes into one last, small task."""
    size = {t: int(graph.output_bytes[t] * scale) + 8 for t in range(graph.num_tasks)}
    made: dict[int, Any] = {}
    for task in graph.topological_order.tolist():
        made[task] = delayed(make)(size[task], *(made[p] for p in graph.predecessors.of(task)), dask_key_name=f"make-{task}")
    ends = [t for t in made if not graph.successors.of(t)]
    if len(ends) == 1:
        return made[ends[0]], {f"make-{t}": s for t, s in size.items()}
    return delayed(make)(8, *(made[t] for t in ends), dask_key_name="make-end"), {
        **{f"make-{t}": s for t, s in size.items()},
        "make-end": 8,
    }


def reduction() -> tuple[Any, Measured | None]:
    level = [delayed(make)(8 * MB, dask_key_name=f"leaf-{k}") for k in range(64)]
    sizes = {f"leaf-{k}": 8 * MB for k in range(64)}
    while len(level) > 1:
        names = [f"sum-{len(level)}-{k}" for k in range(len(level) // 2)]
        level = [delayed(make)(8 * MB, level[2 * k], level[2 * k + 1], dask_key_name=name) for k, name in enumerate(names)]
        sizes |= dict.fromkeys(names, 8 * MB)
    return level[0], Measured(output_bytes=sizes)


def uneven_reduction() -> tuple[Any, Measured | None]:
    """A reduction whose leaves differ in size: the sizes that dask.order does not know."""
    rng = random.Random(4)
    level: list[Any] = []
    sizes: dict[str, int] = {}
    for k in range(48):
        raw, small = rng.choice((4, 8, 40)) * MB, rng.choice((1, 2, 12)) * MB
        sizes |= {f"raw-{k}": raw, f"part-{k}": small}
        level.append(delayed(make)(small, delayed(make)(raw, dask_key_name=f"raw-{k}"), dask_key_name=f"part-{k}"))
    sizes["total"] = MB
    return delayed(make)(MB, *level, dask_key_name="total"), Measured(output_bytes=sizes)


def transpose() -> tuple[Any, Measured | None]:
    array = da.random.default_rng(0).random((6000, 6000), chunks=(1000, 1000))
    return (array + array.T).sum(axis=0), None


def rechunk(method: str = "tasks") -> tuple[Any, Measured | None]:
    array = da.random.default_rng(0).random((6000, 6000), chunks=(6000, 500))
    return (array.rechunk((500, 6000), method=method) ** 2).mean(axis=1), None


def overlap() -> tuple[Any, Measured | None]:
    array = da.random.default_rng(0).random((6000, 6000), chunks=(1200, 1200))
    return da.map_overlap(lambda x: x + np.roll(x, 1, axis=0), array, depth=20, boundary="reflect").sum(axis=0), None


def shuffle() -> tuple[Any, Measured | None]:
    """Every partition is cut into pieces by destination, every destination joins its pieces: all to all."""
    parts, piece = 14, MB
    sizes: dict[str, int] = {}
    pieces: dict[tuple[int, int], Any] = {}
    for p in range(parts):
        raw = delayed(make)(parts * piece, dask_key_name=f"read-{p}")
        sizes[f"read-{p}"] = parts * piece
        for q in range(parts):
            pieces[p, q] = delayed(make)(piece, raw, dask_key_name=f"cut-{p}-{q}")
            sizes[f"cut-{p}-{q}"] = piece
    joined = [delayed(make)(parts * piece, *(pieces[p, q] for p in range(parts)), dask_key_name=f"join-{q}") for q in range(parts)]
    done = [delayed(make)(MB // 10, j, dask_key_name=f"use-{q}") for q, j in enumerate(joined)]
    sizes |= {f"join-{q}": parts * piece for q in range(parts)} | {f"use-{q}": MB // 10 for q in range(parts)} | {"end": 8}
    return delayed(make)(8, *done, dask_key_name="end"), Measured(output_bytes=sizes)


def dag() -> tuple[Any, Measured | None]:
    root, sizes = from_graph(random_dag(150, seed=6, max_bytes=12 * MB), 1.0)
    return root, Measured(output_bytes=sizes)


def assembly() -> tuple[Any, Measured | None]:
    from task_trees import grid

    graph = assembly_tree(grid(20, 20), "metis", 0.2)
    root, sizes = from_graph(graph, 40 * MB / int(graph.output_bytes.max()))
    return root, Measured(output_bytes=sizes)


def harpoon_tree() -> tuple[Any, Measured | None]:
    root, sizes = from_graph(harpoon(branches=4, levels=2, large=48 * MB, small=MB // 10), 1.0)
    return root, Measured(output_bytes=sizes)


WORKLOADS: dict[str, Callable[[], tuple[Any, Measured | None]]] = {
    "tree reduction": reduction,
    "uneven reduction": uneven_reduction,
    "array + transpose": transpose,
    "rechunk": rechunk,
    "rechunk (Dask: P2P)": rechunk,
    "map-overlap": overlap,
    "random DAG": dag,
    "assembly tree": assembly,
    "shuffle-like": shuffle,
    "harpoon": harpoon_tree,
}


WATCHER = """
import os, select, sys, time
page, peak = os.sysconf("SC_PAGE_SIZE"), 0
files = [open(f"/proc/{pid}/statm", "rb", buffering=0) for pid in sys.argv[1:]]
def total():
    for file in files:
        file.seek(0)
        yield int(file.read().split()[1]) * page
print(sum(total()), flush=True)
while not select.select([sys.stdin], [], [], 0.0015)[0]:
    peak = max(peak, sum(total()))
print(peak, flush=True)
"""


@contextmanager
def watched(client: Client) -> Iterator[list[int]]:
    """Afterwards the list holds the most bytes by which the workers, all together, grew while inside. A process of its own looks."""
    pids = [str(pid) for pid in client.run(os.getpid).values()]
    command = [sys.executable, "-I", "-S", "-c", WATCHER, *pids]
    grown: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        before = int(watcher.stdout.readline())
        yield grown
        out, _ = watcher.communicate("stop\n")
        grown.append(max(0, int(out) - before))


def _settle(client: Client) -> None:
    """Wait until the workers hold nothing and give freed memory back to the system, so that the next run starts level."""
    for _ in range(50):
        if not any(client.run(lambda dask_worker: len(dask_worker.data)).values()):
            break
        time.sleep(0.1)
    time.sleep(0.2)
    client.run(_trim)


def _trim() -> None:
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def run(workers: int, names: list[str], factor: float) -> list[dict[str, Any]]:
    rows = []
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        client.run(_trim)
        for name in names:
            collection, sizes = WORKLOADS[name]()
            begin = time.perf_counter()
            measured = sizes or measure(collection)
            work = workload(collection, sizes=measured)
            outcome = schedule(work.graph, time_limit_s=5)
            planning = time.perf_counter() - begin
            least = outcome.peak_bytes or 0
            options: dict[str, Any] = {"memory": int(least * factor), "processors": workers} if workers > 1 else {}
            options |= {"sizes": work, "plan": outcome}
            theirs = rechunk("p2p")[0] if "P2P" in name else collection  # what Dask does by default on a cluster; memfit refuses it
            rows.append(_compare(client, name, theirs, collection, options, {"workers": workers, "tasks": work.graph.num_tasks}))
            rows[-1] |= {
                "planned MB": f"{(int(least * factor) if workers > 1 else least) / MB:.0f}",
                "bound MB": f"{outcome.lower_bound_bytes / MB:.0f}",
                "plan s": f"{planning:.1f}",
            }
            print(rows[-1], file=sys.stderr)
    return rows


def _compare(client: Client, name: str, theirs: Any, collection: Any, options: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Dask's way, then ours, on the same workers; a first, unmeasured run of Dask's loads what has to be loaded."""
    expected = client.compute(theirs, sync=True)
    _settle(client)
    with watched(client) as grown:
        begin = time.perf_counter()
        client.compute(theirs, sync=True)
        dask_s = time.perf_counter() - begin
    dask_peak = grown[0]
    _settle(client)
    with watched(client) as grown:
        begin = time.perf_counter()
        done = compute(collection, client=client, **options)
        ours_s = time.perf_counter() - begin
    ours_peak = grown[0]
    _settle(client)
    np.testing.assert_allclose(np.asarray(done.values, float), np.asarray(expected, float), rtol=1e-6)
    return {
        "workload": name, **row, "dask MB": f"{dask_peak / MB:.0f}", "memfit MB": f"{ours_peak / MB:.0f}",
        "memfit / dask memory": f"{ours_peak / max(dask_peak, 1):.2f}", "dask s": f"{dask_s:.2f}", "memfit s": f"{ours_s:.2f}",
        "memfit / dask time": f"{ours_s / dask_s:.2f}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--factor", type=float, default=1.5, help="Memory on two workers, as a multiple of the least on one.")
    options = parser.parse_args()
    rows = run(1, options.workloads, options.factor) + run(2, options.workloads, options.factor)
    text = (
        "`client.compute(collection)` against `memfit.tasks.dask.collections.compute`, one after the other on the same LocalCluster of one-thread workers. "
        "*dask MB* and *memfit MB* are the growth of the workers' resident memory, all workers together, sampled from outside every 1-2 ms: real "
        "memory, temporaries and copies between workers included. One worker: precedence edges, the least memory. Two workers: booked memory with "
        f"a bound of {options.factor} times that least. *planned MB* is the promised bound, *bound MB* the proven least of any order. "
        "*plan s* is measuring and planning before the run (at most 5 s of search, spent in full where the optimum is not proven), not part of "
        "*memfit s*. Single runs on a shared machine: times are noisy. Where memfit is above 1.00 it loses. Dask's "
        "peer-to-peer rechunk moves data through the disk of the workers; it is shown against memfit on the task-based rechunk."
    )
    columns = list(rows[0])
    write_results("dask_memory", title="Dask's order against memfit's", text=text, columns=columns, rows=rows, run=provenance(0, PACKAGES))
