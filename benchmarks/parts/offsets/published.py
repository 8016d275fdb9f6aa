"""Packing buffers: height against the lower bound for memfit, its greedy orders, TFLite's and Inductor's; and growth to 10^5 buffers."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from benchmarks.lib.results import DATA, ROOT, provenance, write_results
from benchmarks.models.offset_instances import cut_anywhere, cut_evenly
from memfit.core.packing import Buffer, check_packing
from memfit.offsets import pack, read_buffers
from memfit.offsets.greedy import greedy_orders, make_windows, place_in_order
from memfit.offsets.problem import make_problem

INSTANCES = DATA / "offsets"
CAPACITY = 1_048_576
INDUCTOR_LIMIT = 3_000  # its tree of splits is walked in Python for every buffer


# -- baselines, written from their published descriptions ------------------------------------------------------------


def tflite_greedy(buffers: Sequence[Buffer]) -> list[int]:
    """Greedy by size (Pisarchyk, Lee 2020): largest first, each into the smallest gap between those it meets, else on top."""
    start, stop, size = np.array([(b.start, b.stop, b.size) for b in buffers], np.int64).T
    order = np.lexsort((start, -size))
    offsets = np.zeros(len(buffers), np.int64)
    by_address = np.empty(0, np.int64)
    for x in order:
        meets = by_address[(start[by_address] < stop[x]) & (stop[by_address] > start[x])]
        if len(meets):
            tops = np.maximum.accumulate(offsets[meets] + size[meets])
            below = np.concatenate([[0], tops[:-1]])
            gaps = offsets[meets] - below
            fits = np.nonzero(gaps >= size[x])[0]
            offsets[x] = below[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1]
        by_address = np.insert(by_address, np.searchsorted(offsets[by_address], offsets[x], side="right"), x)
    return offsets.tolist()


class _Slot:
    """A range of addresses over time: who lives there when, and the halves into which a smaller guest split it."""

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.guests: list[tuple[int, int, _Slot | None]] = []  # birth, death, what is left beside the guest

    def place(self, b: Buffer) -> int | None:
        """One whose life meets nobody's takes the slot; if it meets exactly one guest, it may go beside it."""
        if b.size > self.size:
            return None
        met = [g for g in self.guests if g[0] < b.stop and b.start < g[1]]
        if not met:
            rest = _Slot(self.offset + b.size, self.size - b.size) if b.size < self.size else None
            self.guests.append((b.start, b.stop, rest))
            return self.offset
        if len(met) == 1 and met[0][2] is not None:
            born, died, rest = met[0]
            found = rest.place(b)
            if found is not None:  # the pair is one guest from now on
                self.guests[self.guests.index(met[0])] = (min(born, b.start), max(died, b.stop), rest)
            return found
        return None


def inductor_greedy(buffers: Sequence[Buffer]) -> list[int]:
    """Inductor's pool planner: largest first, into a slot whose guests' lives it does not meet, splitting slots; else a new one."""
    slots: list[_Slot] = []
    offsets = [0] * len(buffers)
    height = 0
    for k in sorted(range(len(buffers)), key=lambda k: (-buffers[k].size, buffers[k].start)):
        found = next((at for s in slots if (at := s.place(buffers[k])) is not None), None)
        if found is None:
            slots.append(_Slot(height, buffers[k].size))
            found = slots[-1].place(buffers[k])
            height += buffers[k].size
        assert found is not None
        offsets[k] = found
    return offsets


# -- the table --------------------------------------------------------------------------------------------------------


def instances() -> Iterator[tuple[str, tuple[Buffer, ...], int | None]]:
    """Name, buffers, and the capacity at which the instance is asked (none: as low as can be)."""
    for path in sorted(INSTANCES.glob("*.csv")):
        yield path.stem, read_buffers(path), CAPACITY if path.stem.startswith("minimalloc") else None
    for seed in (100, 101, 102, 103):
        buffers, capacity = cut_anywhere(200, seed, drop=0.03)
        yield f"cut anywhere {seed}", buffers, capacity
        buffers, capacity = cut_evenly(seed)
        yield f"cut evenly {seed}", buffers, capacity


def compare(name: str, buffers: tuple[Buffer, ...], capacity: int | None, time_limit_s: float) -> Iterator[dict[str, Any]]:
    began_cpu = time.process_time()
    packing = pack(buffers, capacity, time_limit_s)
    cpu_s = time.process_time() - began_cpu
    bound = packing.lower_bound

    def row(method: str, offsets: Sequence[int], seconds: float, status: str = "", cpu: str = "") -> dict[str, Any]:
        check_packing(buffers, offsets)
        height = max(o + b.size for o, b in zip(offsets, buffers, strict=True))
        return {
            "instance": name, "buffers": len(buffers), "lower_bound": bound, "method": method, "height": height,
            "height / bound": f"{height / bound:.4f}", "inside capacity": "" if capacity is None else height <= capacity,
            "status": status, "seconds": f"{seconds:.3f}", "cpu_s": cpu, "load": f"{os.getloadavg()[0]:.1f}",
        }  # fmt: skip

    def timed(function: Callable[[Sequence[Buffer]], list[int]]) -> tuple[list[int], float]:
        began = time.perf_counter()
        return function(buffers), time.perf_counter() - began

    asked = "lowest" if capacity is None else "at capacity"
    yield row(f"memfit pack, {asked} ({packing.method})", packing.offsets, packing.seconds, packing.status.value, f"{cpu_s:.1f}")
    problem = make_problem(*np.array([(b.start, b.stop, b.size) for b in buffers], np.int64).T)
    windows = make_windows(problem)
    for method, order in greedy_orders(problem):
        began = time.perf_counter()
        offsets = place_in_order(problem, windows, order).tolist()
        yield row(f"memfit {method}", offsets, time.perf_counter() - began)
    yield row("TFLite greedy by size", *timed(tflite_greedy))
    if len(buffers) <= INDUCTOR_LIMIT:
        yield row("Inductor pools", *timed(inductor_greedy))
    else:
        yield {
            "instance": name, "buffers": len(buffers), "lower_bound": bound, "method": "Inductor pools", "height": "", "height / bound": "",
            "inside capacity": "", "status": f"not run: above {INDUCTOR_LIMIT} buffers", "seconds": "", "cpu_s": "", "load": "",
        }  # fmt: skip


def random_program(num_buffers: int, seed: int) -> tuple[Buffer, ...]:
    """Births one after another; most buffers die soon, some live until the mirrored moment, as activations do."""
    random = Random(seed)
    rows = []
    for k in range(num_buffers):
        long = k < num_buffers // 2 and random.random() < 0.1
        stop = num_buffers - k if long else k + 1 + int(random.expovariate(1 / 20))
        rows.append(
            Buffer(id=str(k), start=k, stop=max(stop, k + 1), size=random.choice((1, 4, 16, 64)) * 1024 + 512 * random.randrange(8))
        )
    return tuple(rows)


def growth(seed: int) -> Iterator[dict[str, Any]]:
    for num in (1_000, 3_000, 10_000, 30_000, 100_000):
        program, began_cpu = random_program(num, seed), time.process_time()
        packing = pack(program, None, 30.0)
        yield {
            "buffers": num, "height / bound": f"{packing.height / packing.lower_bound:.4f}", "status": packing.status.value,
            "method": packing.method, "seconds": f"{packing.seconds:.2f}", "cpu_s": f"{time.process_time() - began_cpu:.1f}",
            "load": f"{os.getloadavg()[0]:.1f}",
        }  # fmt: skip


def cold(time_limit_s: float) -> Iterator[dict[str, Any]]:
    """`memfit pack` as a process of its own with an empty numba cache: import, compilation, search and output, each time anew."""
    for path in sorted(INSTANCES.glob("minimalloc*.csv")):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
            command = [
                sys.executable,
                "-m",
                "memfit",
                "pack",
                str(path),
                "--capacity",
                str(CAPACITY),
                "--time-limit",
                str(time_limit_s),
                "--json",
            ]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = json.loads(done.stdout)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        yield {
            "instance": path.stem, "status": answer["status"], "inside capacity": answer["height"] <= CAPACITY, "exit code": done.returncode,
            "whole process, s": f"{seconds:.1f}", "cpu_s": f"{cpu_s:.1f}", "load": f"{os.getloadavg()[0]:.1f}",
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the name of the instances to run; writes nothing")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--cold", action="store_true", help="only minimalloc's instances, each a process with an empty compilation cache")
    options = parser.parse_args()
    if options.cold:
        rows: list[dict[str, Any]] = []
        for row in cold(options.time_limit):
            rows.append(row)
            print(" | ".join(str(v) for v in row.values()), file=sys.stderr, flush=True)
        run = provenance(0, ("numpy", "numba"))
        write_results("offsets_cold", title="Packing from cold", text=COLD_TEXT, columns=list(rows[0]), rows=rows, run=run)
        return
    pack(random_program(20, 0), None, 1.0)
    pack(*cut_anywhere(100, 1))  # compile before the clock starts; cold figures are in the text
    rows = []
    for name, buffers, capacity in instances():
        if options.only in name:
            for row in compare(name, buffers, capacity, options.time_limit):
                rows.append(row)
                print(" | ".join(str(v) for v in row.values()), file=sys.stderr, flush=True)
    grown = [] if options.no_growth else list(growth(1))
    for row in grown:
        print(row, file=sys.stderr)
    if options.only:
        return
    run = provenance(0, ("numpy", "numba"))
    write_results("offsets", title="Packing buffers", text=TEXT, columns=list(rows[0]), rows=rows, run=run)
    if grown:
        write_results("offsets_growth", title="Packing time against size", text=GROWTH_TEXT, columns=list(grown[0]), rows=grown, run=run)


TEXT = """\
Height of the packing over the lower bound (the maximum load), and seconds on two cores shared with other work (`load` is the load average at
the time; with 2 all are ours). `cpu_s` is the processor time of `memfit pack`, which other work does not stretch: two cores give 60 in 30 s.
`memfit pack` is asked at the capacity where one is known to be feasible, as minimalloc's benchmark does, else for the lowest packing.
Compiled code is warm; from cold see *Packing from cold*. TFLite's and Inductor's planners are
our reimplementations from their descriptions, not their code. The `cut` instances are ours, of known optimum;
for ones nobody looked at see *Packing instances nobody tuned for*."""

COLD_TEXT = """\
`memfit pack FILE --capacity 1048576 --time-limit 30 --json` as a process of its own, each time with an empty numba cache as on a fresh clone: import,
compilation (six to seven of the seconds), search and output. `load` is the load average at the time: other work shared the two cores."""

GROWTH_TEXT = """\
Random programs with short-lived and mirrored long-lived buffers, as low as can be, warm. Up to 3,000 buffers the exact search
takes part; above, greedy orders until within 0.5 % of the bound, then local search for at most 5 s."""
