"""Chain checkpointing: schedule cost and time of memfit, checkpoint-schedules and pyrevolve, in one run.

Every case runs in a process of its own under a time limit; a case that takes longer, or fails, stays in the table. Costs are
counted from the emitted schedule, not taken from what a package says of itself: forwards, backwards, writes and reads of every
level, priced alike for all. Times are processor seconds, because the machine is shared, and include emission: first run in a fresh
process (imports left out), "warm" is the best of the repeats after it. From 4,000 steps on memfit uses compiled rows: the very first such
case compiles them (two levels, uf 1, ub 1, 10,000 steps), later processes load them from numba's cache. "not run": a shorter chain
already took the package too long or failed. The peers come with `pip install -e ".[peers]"`.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.lib.results import provenance, write_results

TITLE = "Chain checkpointing: cost of the schedule and time to make it"
TEXT = f"""\
A case is stopped after {{limit:.0f}} s, from 10,000 steps on after {{short:.0f}} s (memfit's: {{long:.0f}} s).

{(__doc__ or "").split(chr(10) * 2, 1)[1].strip()}"""
LENGTHS = (500, 2_000, 10_000, 100_000)
THEMES: dict[str, dict[str, Any]] = {
    "two levels (5, 20), uf 1, ub 1": {"slots": [5, 20], "write": [0, 5], "read": [0, 5], "uf": 1, "ub": 1},
    "two levels (5, 20), uf 1, ub 2": {"slots": [5, 20], "write": [0, 5], "read": [0, 5], "uf": 1, "ub": 2},
    "two levels (5, 20), uf 10, ub 1": {"slots": [5, 20], "write": [0, 5], "read": [0, 5], "uf": 10, "ub": 1},
    "two levels (5, 20), level 0 costs": {"slots": [5, 20], "write": [1, 5], "read": [1, 5], "uf": 1, "ub": 2},
    "three levels (3, 5, 10)": {"slots": [3, 5, 10], "write": [0, 3, 20], "read": [0, 2, 10], "uf": 1, "ub": 2},
    "one free level (10)": {"slots": [10], "write": [0], "read": [0], "uf": 1, "ub": 2},
    "memory (5) and unbounded disk": {"slots": [5, None], "write": [0, 20], "read": [0, 10], "uf": 1, "ub": 1},
}
SHORT = ("two levels (5, 20), uf 1, ub 1", "two levels (5, 20), uf 10, ub 1")  # whose longest case would repeat another's


# -- one case, in its own process ----------------------------------------------------------------------------------


def memfit_case(case: dict[str, Any]) -> dict[str, Any]:
    from memfit.chain import Chain, StorageLevel, plan_hrevolve

    levels = tuple(
        StorageLevel(slots=s, write_cost=w, read_cost=r) for s, w, r in zip(case["slots"], case["write"], case["read"], strict=True)
    )
    chain = Chain(num_steps=case["length"], levels=levels, forward_cost=case["uf"], backward_cost=case["ub"])
    seconds = []
    for _ in range(case["repeats"]):
        begin = time.process_time()
        plan = plan_hrevolve(chain)
        planned = time.process_time() - begin
        for _step in plan.steps():
            pass
        seconds.append(time.process_time() - begin)
    counts = plan.counts()
    return {
        "forwards": counts.num_forward,
        "backwards": counts.num_backward,
        "writes": counts.writes,
        "reads": counts.reads,
        "cold_s": seconds[0],
        "warm_s": min(seconds[1:], default=None),
        "plan_s": planned,
        "status": str(plan.status),
        "claimed": plan.cost,
    }


def count_operations(operations: Any, num_levels: int, *, own_forwards: int) -> dict[str, Any]:
    """Both packages name operations alike; `own_forwards` are the steps rerun with adjoint data, which the model counts as backward."""
    forwards, backwards = -own_forwards, 0
    writes, reads = [0] * num_levels, [0] * num_levels
    for op in operations:
        if op.type == "Forward":
            forwards += 1 if isinstance(op.index, int) else op.index[1] - op.index[0]
        elif op.type == "Forwards":
            forwards += op.index[1] - op.index[0] + 1
        elif op.type == "Backward":
            backwards += 1
        elif op.type in ("Write", "Read"):
            (writes if op.type == "Write" else reads)[op.index[0]] += 1
        elif op.type in ("Write_disk", "Read_disk"):
            (writes if op.type == "Write_disk" else reads)[1] += 1
        elif op.type in ("Write_memory", "Read_memory"):
            (writes if op.type == "Write_memory" else reads)[0] += 1
    return {"forwards": forwards, "backwards": backwards, "writes": writes, "reads": reads}


def checkpoint_schedules_case(case: dict[str, Any]) -> dict[str, Any]:
    from checkpoint_schedules.hrevolve_sequences import disk_revolve, hrevolve, revolve

    length, slots, uf, ub = case["length"], case["slots"], case["uf"], case["ub"]
    begin = time.process_time()
    if len(slots) == 1:
        sequence = list(revolve(length, slots[0], 0, 0, uf, ub))
    elif slots[-1] is None:
        sequence = list(disk_revolve(length, slots[0], case["read"][1], case["write"][1], uf, ub))
    else:
        sequence = list(hrevolve(length, tuple(slots), case["write"], case["read"], uf, ub))
    seconds = time.process_time() - begin
    return {**count_operations(sequence, len(slots), own_forwards=length + 1), "cold_s": seconds, "warm_s": None}


def pyrevolve_case(case: dict[str, Any]) -> dict[str, Any]:
    from pyrevolve.schedulers import Architecture, CRevolve, HRevolve

    length, slots = case["length"], case["slots"]
    begin = time.process_time()
    if len(slots) == 1:
        scheduler = CRevolve(slots[0], length + 1)
        actions = scheduler.oplist
        seconds = time.process_time() - begin
        forwards = sum(a.capo - a.old_capo for a in actions if a.type == a.ADVANCE)
        backwards = sum(a.type in (a.LASTFW, a.REVERSE) for a in actions)
        return {"forwards": forwards, "backwards": backwards, "writes": [0], "reads": [0], "cold_s": seconds, "warm_s": None}
    if slots[-1] is None:
        raise NotImplementedError("no unbounded level")
    architecture = Architecture.__new__(Architecture)
    architecture.nblevels, architecture.wd, architecture.rd, architecture.sizes = len(slots), case["write"], case["read"], slots
    scheduler = HRevolve(length, length, architecture, uf=case["uf"], ub=case["ub"])
    seconds = time.process_time() - begin
    return {**count_operations(scheduler.oplist, len(slots), own_forwards=0), "cold_s": seconds, "warm_s": None}


PACKAGES = {"memfit": memfit_case, "checkpoint-schedules": checkpoint_schedules_case, "pyrevolve": pyrevolve_case}


def run_one(text: str) -> None:
    case = json.loads(text)
    result = PACKAGES[case["package"]](case)
    price = result["forwards"] * case["uf"] + result["backwards"] * case["ub"]
    for level in range(len(case["slots"])):
        price += result["writes"][level] * case["write"][level] + result["reads"][level] * case["read"][level]
    print(json.dumps({**result, "cost": price}))


# -- all cases -----------------------------------------------------------------------------------------------------


def attempt(case: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """A case in its own process: its result, or why there is none. The limit is on processor seconds."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s)))

    begin = time.perf_counter()
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    wall_s = time.perf_counter() - begin
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {**case, "failure": f"> {limit_s:.0f} s", "wall_s": wall_s}
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["?"])[-1]
        return {**case, "failure": error.split(":")[0].split(".")[-1], "detail": error, "wall_s": wall_s}
    return {**case, **json.loads(done.stdout.splitlines()[-1]), "wall_s": wall_s}


def limit_factor(package: str, length: int) -> float:
    """Other packages take minutes from 10,000 steps on: a shorter wait is enough to see that."""
    return 2.0 if package == "memfit" else 1.0 if length <= 2_000 else 1 / 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=60.0, help="processor seconds after which a case is stopped")
    parser.add_argument("--max-steps", type=int, default=LENGTHS[-1], help="leave out longer chains")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each memfit case in its process")
    arguments = parser.parse_args()
    if arguments.one:
        run_one(arguments.one)
        return
    rows: list[dict[str, Any]] = []
    given_up: set[tuple[str, str]] = set()
    for theme, problem in THEMES.items():
        for length in (x for x in LENGTHS if x <= arguments.max_steps):
            for package in PACKAGES:
                if (theme, package) in given_up or (length > 50_000 and theme in SHORT):
                    continue
                repeats = arguments.repeats if length < 50_000 or problem["slots"] == [10] else 1
                case = {"theme": theme, "package": package, "length": length, "repeats": repeats, **problem}
                row = attempt(case, arguments.limit * limit_factor(package, length))
                rows.append(row)
                if "failure" in row and package != "memfit":
                    given_up.add((theme, package))  # longer chains only take longer
                print(f"{theme:36} {length:7} {package:22} {row.get('cost', row.get('failure'))} {row.get('cold_s', '')}", flush=True)
    text = TEXT.format(limit=arguments.limit, short=arguments.limit / 6, long=2 * arguments.limit)
    facts = provenance(0, ("numpy", "numba", "checkpoint-schedules", "pyrevolve"))
    write_results("chain", title=TITLE, text=text, columns=(), rows=rows, run=facts, table="chains")


if __name__ == "__main__":
    main()
