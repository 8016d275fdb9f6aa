"""Dask collections inside a memory bound: planned by memfit.tasks, executed by any `distributed.Client` (extra `dask`).

    collection ── measure ──> sizes ── schedule ──> order ──┬─ 1 processor: precedence edges along the order, one submission
                                                            ├─ P: tasks are started as booked memory allows, others wait
                                                            └─ too little memory: the same edges with spill and reload tasks

Task priorities do not bind on Dask (a worker starts another ready task before it hears of the better one), edges do. An edge
from a task to the next of the order keeps the former's output alive until the latter has run, which it is anyway: outputs live
at least to their first reader. On P workers the bound is for all of them together, copies of inputs included.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dask._task_spec import Alias, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.base import flatten, optimize
from dask.sizeof import sizeof
from dask.utils import ensure_dict, key_split

from memfit.core.errors import BadInput, NoPlanFound, Unsupported
from memfit.core.units import parse_bytes
from memfit.tasks.api import schedule
from memfit.tasks.dask.booked_run import BookedRun, Workers
from memfit.tasks.dask.sizes import choose_samples, run_here, sort_topologically
from memfit.tasks.dask.worker import Call, InputLost, discard, execute, forget, move_in, move_out, read_back, store, write_out
from memfit.tasks.graph import TaskGraph, task_graph
from memfit.tasks.judge import SpillPlan
from memfit.tasks.outcome import TaskOutcome
from memfit.tasks.spilling import spill_plan

Key = Any
_POLL_S = 0.5
_PATIENCE_S = 60
_MOST_RESTARTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of each key: the bytes of its value, the bytes it needs besides while it runs, and its seconds."""

    output_bytes: Mapping[Key, int]
    memory_bytes: Mapping[Key, int] = field(default_factory=dict)
    seconds: Mapping[Key, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Dask graph without its aliases, and the same as a task graph: task i is `keys[i]`."""

    nodes: Mapping[Key, GraphNode]
    keys: tuple[Key, ...]
    inputs: tuple[tuple[tuple[Key, int], ...], ...]  # of task i: (the name its function uses, task that makes it)
    results: tuple[int, ...]
    repack: Callable[[list[Any]], Any]
    graph: TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What `compute` did. `peak_booked_bytes` is the most that was booked at once; `restarts` counts lost workers."""

    values: Any
    outcome: TaskOutcome
    mode: str
    seconds: float
    peak_booked_bytes: int = 0
    written_bytes: int = 0
    restarts: int = 0
    oversized: tuple[Key, ...] = ()


def measure(*collections: Any, per_group: int | None = 1) -> Measured:
    """A sampling run in this process: tasks are grouped by name, and of each group the `per_group` cheapest to reach are run.

    None runs every task. The largest value of a group stands for those of it that did not run.
    """
    nodes, _, _ = _flatten(collections)
    order = sort_topologically(nodes)
    groups: dict[str, list[Key]] = {}
    for key in order:
        groups.setdefault(key_split(key), []).append(key)
    wanted = set(nodes) if per_group is None else choose_samples(nodes, order, groups, per_group)
    size, memory, seconds = run_here(nodes, [k for k in order if k in wanted], sizeof)
    for members in groups.values():
        ran = [k for k in members if k in size]
        for key in members:
            if key not in size:
                size[key] = max(size[k] for k in ran)
                memory[key] = max(memory[k] for k in ran)
                seconds[key] = max(seconds[k] for k in ran)
    return Measured(output_bytes=size, memory_bytes=memory, seconds=seconds)


def workload(*collections: Any, sizes: Measured | Mapping[Key, int] | None = None) -> Workload:
    """The collections as a task graph. Without `sizes` a sampling run measures them (see `measure`)."""
    nodes, results, repack = _flatten(collections)
    measured = measure(*collections) if sizes is None else sizes if isinstance(sizes, Measured) else Measured(output_bytes=sizes)
    keys = tuple(sort_topologically(nodes))
    position = {key: i for i, key in enumerate(keys)}
    missing = [key for key in keys if key not in measured.output_bytes]
    if missing:
        raise BadInput(f"no size is given for {len(missing)} of {len(keys)} keys, e.g. {str(missing[0])[:80]}: give all, or none.")
    inputs = tuple(tuple((d, position[d]) for d in sorted(nodes[key].dependencies, key=position.__getitem__)) for key in keys)
    graph = task_graph(
        names=[str(key) for key in keys],
        output_bytes=[int(measured.output_bytes[key]) for key in keys],
        memory_bytes=[int(measured.memory_bytes.get(key, 0)) for key in keys],
        time=[float(measured.seconds.get(key, 1.0)) for key in keys],
        edges=[(source, task) for task, mine in enumerate(inputs) for _, source in mine],
    )
    kept = graph.item_kept.copy()
    kept[[position[key] for key in results]] = True  # asked for, so it stays, whoever else reads it
    asked = tuple(position[key] for key in results)
    return Workload(nodes=nodes, keys=keys, inputs=inputs, results=asked, repack=repack, graph=replace(graph, item_kept=kept))


def _flatten(collections: tuple[Any, ...]) -> tuple[dict[Key, GraphNode], list[Key], Callable[[list[Any]], Any]]:
    """All nodes that the results need, without aliases; the keys of the results; and how their values become the answer."""
    if not collections or not all(hasattr(c, "__dask_graph__") for c in collections):
        raise BadInput("Dask collections are expected (delayed, array, bag, ...): nothing else has a graph.")
    ready = optimize(*collections)
    raw: dict[Key, GraphNode] = {}
    for c in ready:
        raw.update(convert_legacy_graph(ensure_dict(c.__dask_graph__())))
    target = {key: node.target for key, node in raw.items() if isinstance(node, Alias) and node.target != key}

    def resolve(key: Key) -> Key:
        while key in target:
            key = target[key]
        return key

    wanted = [[resolve(k) for k in flatten(c.__dask_keys__())] for c in ready]
    needed, stack = dict[Key, GraphNode](), [k for keys in wanted for k in keys]
    while stack:
        key = stack.pop()
        if key not in needed:
            subs = {d: resolve(d) for d in raw[key].dependencies if d in target}
            needed[key] = raw[key].substitute(subs) if subs else raw[key]
            stack.extend(needed[key].dependencies)
    _refuse_peer_to_peer(needed)
    results = list(dict.fromkeys(k for keys in wanted for k in keys))

    def repack(values: list[Any]) -> Any:
        by_key = dict(zip(results, values, strict=True))
        answers = []
        for c, keys in zip(ready, wanted, strict=True):
            finalize, extra = c.__dask_postcompute__()
            flat = iter(keys)
            answers.append(finalize(_nest(c.__dask_keys__(), lambda: by_key[next(flat)]), *extra))  # noqa: B023
        return answers[0] if len(answers) == 1 else tuple(answers)

    return needed, results, repack


def _refuse_peer_to_peer(nodes: Iterable[Key]) -> None:
    """P2P shuffles move data outside of any key, to disk as they like: no plan can see or bound that."""
    kinds = {key_split(key) for key in nodes}
    found = sorted(kind for kind in kinds if "p2p" in kind or kind in ("rechunk-transfer", "shuffle-transfer", "shuffle-barrier"))
    if found:
        raise Unsupported(
            f"the graph holds a peer-to-peer shuffle ({found[0]}), which moves data outside of its tasks: build the collection under "
            "dask.config.set({'array.rechunk.method': 'tasks', 'dataframe.shuffle.method': 'tasks'})."
        )


def _nest(keys: Any, take: Callable[[], Any]) -> Any:
    return [_nest(k, take) for k in keys] if isinstance(keys, list) else take()


def compute(
    *collections: Any,
    client: Any,
    memory: int | str | None = None,
    processors: int | None = None,
    sizes: Measured | Mapping[Key, int] | Workload | None = None,
    plan: TaskOutcome | None = None,
    spill_directory: str | None = None,
    time_limit_s: float = 2.0,
) -> Done:
    """Compute collections on `client` with at most `memory` bytes of outputs and working memory held on all workers together.

    `processors`: how many tasks run at once; by default all threads of all workers when `memory` is given, one without it (the
    least memory). A workload and its plan (`memfit.tasks.schedule(work.graph)`) may be given instead of being made again.
    `spill_directory` must be visible to all workers; a temporary folder of this machine by default.
    """
    begin = time.perf_counter()
    work = sizes if isinstance(sizes, Workload) else workload(*collections, sizes=sizes)
    limit = None if memory is None else parse_bytes(memory, what="memory")
    threads = sum(client.nthreads().values())
    wanted = max(1, processors if processors is not None else threads if limit is not None else 1)
    outcome = plan or schedule(work.graph, time_limit_s=time_limit_s)
    short = limit is not None and outcome.peak_bytes is not None and outcome.peak_bytes > limit
    folder = spill_directory or tempfile.mkdtemp(prefix="memfit-spill-")
    try:
        if short:
            assert limit is not None
            return _run_spilling(client, work, outcome, limit, folder, begin)
        if wanted == 1:
            values, restarts = _run_in_order(client, work, outcome.order, None, folder)
            return Done(
                values=work.repack(values), outcome=outcome, mode="edges", seconds=time.perf_counter() - begin,
                peak_booked_bytes=outcome.peak_bytes or 0,
                restarts=restarts,
            )  # fmt: skip
        return _run_booked(client, work, outcome, limit, wanted, folder, begin)
    finally:
        if spill_directory is None:
            shutil.rmtree(folder, ignore_errors=True)


# -- one processor: precedence edges -------------------------------------------------------------------------------


def _run_spilling(client: Any, work: Workload, outcome: TaskOutcome, limit: int, folder: str, begin: float) -> Done:
    plan = spill_plan(work.graph, outcome.order, limit, divisible=False)
    values, restarts = _run_in_order(client, work, plan.order, plan, folder)
    return Done(
        values=work.repack(values), outcome=outcome, mode="edges+spill", seconds=time.perf_counter() - begin,
        peak_booked_bytes=plan.peak_bytes, written_bytes=plan.written_bytes, restarts=restarts,
    )  # fmt: skip


def chain_tasks(
    work: Workload, order: Iterable[int], plan: SpillPlan | None, folder: str
) -> tuple[dict[Key, GraphNode], list[Key], list[bool]]:
    """The Dask graph in which every step waits for the one before; the keys of the results, and which of them are spilled files."""
    token = uuid.uuid4().hex[:12]
    steps: dict[Key, GraphNode] = {}
    inside: dict[int, Key] = {}  # task -> key of its value in memory
    on_disk: dict[int, Key] = {}  # task -> key of the file's path
    before: list[Any] = []  # the last step, as a reference
    transfers = list(plan.transfers[::-1]) if plan else []

    def add(name: str, task: int, function: Callable[..., Any], *arguments: Any) -> Key:
        key = (f"{name}-memfit-{token}", len(steps))
        steps[key] = Task(key, function, *arguments, *before)
        before[:] = [TaskRef(key)]
        return key

    def move(item: int, out: bool) -> None:
        task = int(work.graph.item_producer[item])
        if not out:
            inside[task] = add("load", task, _load, TaskRef(on_disk[task]))
        elif task not in on_disk:
            on_disk[task] = add("spill", task, partial(_spill, f"{folder}/{token}-{task}.pickle"), TaskRef(inside.pop(task)))
        else:
            inside.pop(task)

    for step, task in enumerate(order):
        while transfers and transfers[-1].step == step:
            transfer = transfers.pop()
            move(transfer.item, transfer.out)
        call = Call(work.nodes[work.keys[task]], [name for name, _ in work.inputs[task]])
        inside[task] = add(key_split(work.keys[task]), task, call, *(TaskRef(inside[source]) for _, source in work.inputs[task]))
    return steps, [inside.get(t) or on_disk[t] for t in work.results], [t not in inside for t in work.results]


def _spill(path: str, value: Any, *_: Any) -> str:
    return write_out(value, path)


def _load(path: str, *_: Any) -> Any:
    return read_back(path)


def _run_in_order(client: Any, work: Workload, order: Iterable[int], plan: SpillPlan | None, folder: str) -> tuple[list[Any], int]:
    """Submit everything at once, pinned to one worker so that nothing is copied; if that one is lost, again on another.

    Returns the values of the results, and how often it began again. The order being a chain, Dask would redo all of it too.
    """
    steps_in_order = tuple(order)
    for restarts in range(_MOST_RESTARTS):
        home = _choose_worker(client)
        steps, results, spilled = chain_tasks(work, steps_in_order, plan, folder)
        futures = client.get(steps, results, sync=False, workers=[home], allow_other_workers=False)
        if _wait_for_end(client, futures, home):
            values = client.gather(futures)
            return [read_back(value) if is_file else value for value, is_file in zip(values, spilled, strict=True)], restarts
        client.cancel(futures, force=True)
    raise NoPlanFound(f"workers were lost {_MOST_RESTARTS} times during this run: find out why they die (memory outside the tasks?).")


def _choose_worker(client: Any) -> str:
    client.wait_for_workers(1, timeout=_PATIENCE_S)
    return str(min(client.nthreads()))


def _wait_for_end(client: Any, futures: list[Any], home: str) -> bool:
    """Wait for the end; False when the worker went away before it."""
    from distributed import wait

    while True:
        try:
            wait(futures, timeout=_POLL_S)
            return True
        except TimeoutError:
            if home not in client.nthreads():
                return False


# -- P processors: booked memory -----------------------------------------------------------------------------------


def _run_booked(client: Any, work: Workload, outcome: TaskOutcome, limit: int | None, processors: int, folder: str, begin: float) -> Done:
    bound = limit if limit is not None else outcome.peak_bytes or 0
    workers = DaskWorkers(client, folder)
    calls = [Call(work.nodes[key], [name for name, _ in mine]) for key, mine in zip(work.keys, work.inputs, strict=True)]
    run = BookedRun(work.graph, outcome.order, bound, processors, calls, [[s for _, s in mine] for mine in work.inputs], workers)
    try:
        values = run.run(work.results)
    finally:
        workers.close()
    return Done(
        values=work.repack(values), outcome=outcome, mode="booked", seconds=time.perf_counter() - begin,
        peak_booked_bytes=run.peak_bytes, restarts=run.restarts, oversized=tuple(work.keys[t] for t in sorted(run.oversized)),
    )  # fmt: skip


_RESULT_S = 2.0
"""For the result of a task that has ended: a number. It takes longer only where the worker that has it is gone."""


class DaskWorkers(Workers):
    """A cluster as the booked run sees it. Tasks are pinned to a worker and hide their inputs from the scheduler: when a worker is
    lost nothing is recomputed behind the plan's back, and the run books the repair itself."""

    def __init__(self, client: Any, folder: str) -> None:
        self.client, self.folder, self.token = client, folder, uuid.uuid4().hex[:12]
        self.pending: dict[Any, tuple[int, str]] = {}
        client.register_plugin(_make_fetch_plugin())

    def threads(self) -> dict[str, int]:
        return dict(self.client.nthreads())

    def start(self, task: int, key: str, call: Call, sources: list[tuple[str, str]], address: str) -> None:
        future = self.client.submit(
            _run_on_worker, self.token, key, call, sources, key=f"{key}-{uuid.uuid4().hex[:8]}",
            workers=[address], allow_other_workers=False, pure=False, retries=0,
        )  # fmt: skip
        self.pending[future] = (task, address)

    def wait(self, timeout_s: float) -> list[tuple[int, str, int | None]]:
        from distributed import wait

        try:
            finished = wait(list(self.pending), timeout=timeout_s, return_when="FIRST_COMPLETED").done
        except TimeoutError:
            return []
        found: list[tuple[int, str, int | None]] = []
        for future in finished:
            task, address = self.pending[future]
            if future.status == "finished":
                try:
                    size = future.result(timeout=_RESULT_S)
                except TimeoutError:  # its worker was lost with it: who looks at the workers next abandons it
                    continue
                found.append((task, address, size))
            elif isinstance(future.exception(), InputLost):
                found.append((task, address, None))
            else:
                future.result()  # the task's own error, to the caller
            del self.pending[future]
        return found

    def abandon(self, address: str) -> list[int]:
        """Forget what was running on a lost worker."""
        lost = [f for f, (_, where) in self.pending.items() if where == address]
        tasks = [self.pending.pop(f)[0] for f in lost]
        self.client.cancel(lost)
        return tasks

    def discard(self, keys: Mapping[str, list[str]]) -> None:
        if keys:  # a worker that is gone has dropped them already
            self.client.run(discard, self.token, [key for mine in keys.values() for key in mine], workers=list(keys), on_error="ignore")

    def move(self, key: str, source: str, target: str) -> None:
        """Through the disk: never two copies in memory."""
        path = f"{self.folder}/{self.token}-{key}.pickle"
        self._call(partial(move_out, self.token, key, path), source)
        self._call(partial(move_in, self.token, key, path), target)

    def take(self, key: str, address: str) -> Any:
        return self._call(partial(_read_value, self.token, key), address)

    def _call(self, function: Callable[[], Any], address: str) -> Any:
        """At once, not through the task queue."""
        try:
            return self.client.run(function, workers=[address], on_error="raise")[address]
        except (OSError, KeyError) as error:
            raise InputLost(f"worker {address} is gone") from error

    def close(self) -> None:
        self.client.cancel(list(self.pending))
        self.client.run(forget, self.token, on_error="ignore")


def _read_value(run: str, key: str) -> Any:
    return store(run)[key]


def _run_on_worker(run: str, key: str, call: Call, sources: list[tuple[str, str]]) -> int:
    from distributed import get_worker
    from distributed.utils import sync

    worker = get_worker()

    def fetch(address: str, source: Any) -> Any:
        async def ask() -> Any:
            return (await worker.rpc(address).memfit_fetch(run=run, key=source))["value"]

        try:
            return sync(worker.loop, ask)
        except (OSError, KeyError) as error:
            raise InputLost(f"{source} cannot be had from {address}") from error

    return execute(run, key, call, sources, worker.address, fetch, sizeof)


def _make_fetch_plugin() -> Any:
    """Workers answer each other's requests for a value; new workers get the plugin when they join."""
    from distributed.diagnostics.plugin import WorkerPlugin
    from distributed.protocol import to_serialize

    class Fetch(WorkerPlugin):  # type: ignore[misc]
        name = "memfit-fetch"
        idempotent = True

        def setup(self, worker: Any) -> None:
            def answer(run: str, key: Any) -> dict[str, Any]:
                return {"value": to_serialize(store(run)[key])}

            worker.handlers["memfit_fetch"] = answer

    return Fetch()
