"""Costs measured on this machine: every op timed by running the program a few times."""

from __future__ import annotations

import time
from dataclasses import replace

from memfit.core.schedule import Compute
from memfit.tape.executor import Executor
from memfit.tape.memory.sharing_tags import share_tags
from memfit.tape.plain_schedules import drop_early
from memfit.tape.program import Program


def measure_costs(program: Program, *, repeats: int = 3) -> Program:
    """The same program with the least measured time of every op. In an arena, so that no allocation is timed."""
    schedule = drop_early(program.graph)
    executor = Executor(program, schedule, layout=share_tags(program.graph, schedule, program.costs))
    least = [2**62] * len(program.graph.ops)
    for _ in range(max(repeats, 1)):
        stamps: list[int] = [time.perf_counter_ns()]
        executor.run(observe=lambda _, stamps=stamps: stamps.append(time.perf_counter_ns()))  # type: ignore[misc]
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                least[step.op] = min(least[step.op], max(stamps[position + 1] - stamps[position], 1))
    costs = replace(
        program.costs,
        op_time_ns=tuple(least),
        variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(least, program.graph.ops, strict=True)),
        device="numpy, measured",
    )
    return replace(program, costs=costs)
