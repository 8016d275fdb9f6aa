"""How the judge's time grows with the number of steps, for schedules that compute once, recompute, or offload."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.results import provenance, write_results
from memfit.core.costs import Costs, Level, uniform_costs
from memfit.core.graph import Graph, Op, Storage, Tensor
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step
from memfit.core.simulate import simulate

SEED = 0
TEXT = """The judge replays schedules of 10^3 to 10^6 steps. *once*: a new graph of steps / 2 ops, each run once and its input freed, judged for
the first time (what an op does to storages is looked up on the way). *again*: the same call repeated, as a planner does. *recompute*: a
graph of 1,000 ops of one to three inputs, whose values are freed and computed over and over. *offload*: the same with copies to the host
and back. Seconds are the least of the repeats; "worst" is the slowest. The machine was shared with other work (load 5 to 7 on 2 cores), so
wall seconds are up to three times what an idle one would show; processor seconds are the fairer figure."""


def chain(num_ops: int) -> Graph:
    return Graph(
        ops=tuple(Op(id=i, name="f", inputs=(i,), outputs=(i + 1,)) for i in range(num_ops)),
        tensors=tuple(Tensor(id=i, storage=i) for i in range(num_ops + 1)),
        storages=tuple(Storage(id=i, size_bytes=64) for i in range(num_ops + 1)),
        sources=(0,),
        results=(num_ops,),
    )


def mesh(num_ops: int, rng: Random) -> Graph:
    """Op i reads one to three of the eight values before it."""
    ops = tuple(
        Op(id=i, name="f", inputs=tuple({rng.randint(max(0, i - 7), i) for _ in range(rng.randint(1, 3))}), outputs=(i + 1,))
        for i in range(num_ops)
    )
    ids = range(num_ops + 1)
    return Graph(
        ops=ops,
        tensors=tuple(Tensor(id=i, storage=i) for i in ids),
        storages=tuple(Storage(id=i, size_bytes=rng.randint(0, 4096)) for i in ids),
        sources=(0,),
        results=(num_ops,),
    )


def computing_once(num_steps: int) -> tuple[Graph, Schedule, Costs]:
    graph = chain(num_steps // 2)
    steps: list[Step] = []
    for op in graph.ops:
        steps += [Compute(op.id), Free(op.id)]
    return graph, Schedule(steps=tuple(steps)), uniform_costs(graph)


def recomputing(num_steps: int) -> tuple[Graph, Schedule, Costs]:
    graph = mesh(1000, Random(SEED))
    steps: list[Step] = []
    while len(steps) < num_steps - 1000:
        steps += [Compute(op.id) for op in graph.ops]
        steps += [Free(storage.id) for storage in graph.storages if storage.id]
    steps = steps[: num_steps - 1000] if num_steps > 1000 else []
    steps += [Compute(op.id) for op in graph.ops]
    return graph, Schedule(steps=tuple(steps)), uniform_costs(graph)


def offloading(num_steps: int) -> tuple[Graph, Schedule, Costs]:
    graph = mesh(1000, Random(SEED))
    base = uniform_costs(graph, time_ns=100)
    costs = Costs(
        op_time_ns=base.op_time_ns, workspace_bytes=base.workspace_bytes, levels=(Level(write_bytes_per_s=1e10, read_bytes_per_s=1e10),)
    )
    steps: list[Step] = [Compute(op.id) for op in graph.ops]
    storage = 1
    while len(steps) + 4 <= num_steps:
        steps += [Offload(storage), Free(storage), Reload(storage), Free(storage, 1)]
        storage = storage % 1000 + 1
    return graph, Schedule(steps=tuple(steps)), costs


CASES: dict[str, Callable[[int], tuple[Graph, Schedule, Costs]]] = {"once": computing_once, "recompute": recomputing, "offload": offloading}


def measure(case: str, num_steps: int, repeats: int) -> list[dict[str, object]]:
    """A row for the case, and for *once* another for judging the same graph again."""
    first: list[tuple[float, float]] = []  # (wall, processor) seconds
    again: list[tuple[float, float]] = []
    for _ in range(repeats):
        graph, schedule, costs = CASES[case](num_steps)
        for seconds in (first, again):
            wall, cpu = time.perf_counter(), time.process_time()
            simulate(graph, schedule, costs)
            seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    runs = {"once": first, "again": again} if case == "once" else {case: first + again}
    return [
        {
            "case": name,
            "steps": len(schedule.steps),
            "ops": len(graph.ops),
            "wall s": round(min(w for w, _ in seconds), 4),
            "worst wall s": round(max(w for w, _ in seconds), 4),
            "cpu s": round(min(c for _, c in seconds), 4),
            "cpu us per step": round(min(c for _, c in seconds) / len(schedule.steps) * 1e6, 2),
        }
        for name, seconds in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6], help="schedule lengths")
    parser.add_argument("--repeats", type=int, default=4, help="runs per length; the least counts")
    parser.add_argument("--dry", action="store_true", help="print the rows, write no file")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        for num_steps in arguments.steps:
            rows += measure(case, num_steps, arguments.repeats if num_steps < 10**6 else min(arguments.repeats, 2))
            print(rows[-1])
    if not arguments.dry:
        write_results("judge", title="The judge", text=TEXT, columns=list(rows[0]), rows=rows, run=provenance(SEED))


if __name__ == "__main__":
    main()
