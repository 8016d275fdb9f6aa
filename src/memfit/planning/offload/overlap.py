"""When to copy: a schedule with sends and fetches, spread out so that ops hide the copies, as far as memory allows.

before   F1 send F2 F3 Free(1) ...  fetch B1        as a planner writes it: every copy is waited for
after    F1 send F2 F3 F4 F5 Free(1) ... fetch B3 B2 B1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from memfit.core.costs import HOST, Costs
from memfit.core.graph import Graph
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step
from memfit.core.simulate import simulate
from memfit.planning.problem import Problem


def overlap_copies(problem: Problem, schedule: Schedule) -> Schedule:
    """Sends right after their makers; frees of what is being sent when the copy is complete; fetches ahead of their readers, in the
    planner's order or in that of their readers. Each move only as far as memory allows."""
    steps = _delay_frees(problem, _offload_at_once(problem.graph, schedule.steps))
    orders = (steps, _move_to_readers(problem.graph, steps))
    ahead = [Schedule(steps=tuple(_advance_reloads(problem, list(order)))) for order in orders]
    best = min(ahead, key=lambda s: simulate(problem.graph, s, problem.costs).time_ns)
    return Schedule(steps=tuple(_free_host_copies(problem.graph, best.steps)))


def _free_host_copies(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """The host's copies go when the last device copy goes, be it freed or written over, or with the step."""
    sent = {step.storage for step in steps if isinstance(step, Offload)}
    last = {step.storage: isinstance(step, Reload) for step in steps if isinstance(step, Free | Reload) and step.storage in sent}
    found: list[Step] = [Free(storage, HOST) for storage in sorted(sent) if last.get(storage, True)]
    sent -= {step.storage for step in found if isinstance(step, Free)}
    for step in reversed(steps):
        if isinstance(step, Compute):
            gone = {graph.storage_of(old) for _, old in graph.ops[step.op].form(step.variant).inplace_of} & sent
        else:
            gone = {step.storage} & sent if isinstance(step, Free) else set()
        found += [Free(storage, HOST) for storage in sorted(gone)]
        sent -= gone
        found.append(step)
    return found[::-1]


def _offload_at_once(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """What is never fetched, because it was there all the time after all, is not sent."""
    sent = {step.storage for step in steps if isinstance(step, Offload)} & {step.storage for step in steps if isinstance(step, Reload)}
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Offload):
            continue
        found.append(step)
        if isinstance(step, Compute):
            made = {graph.storage_of(t) for t in graph.ops[step.op].form(step.variant).outputs} & sent
            found += [Offload(storage, HOST) for storage in sorted(made)]
            sent -= made
    return found


def _delay_frees(problem: Problem, steps: list[Step]) -> list[Step]:
    graph, costs = problem.graph, problem.costs
    free_ns, complete_ns = 0, {}
    for step, now_ns in zip(steps, _clock(costs, steps), strict=True):
        if isinstance(step, Offload):
            free_ns = max(free_ns, now_ns) + costs.levels[HOST - 1].write_ns(graph.storages[step.storage].size_bytes)
            complete_ns[step.storage] = free_ns
    for storage, end_ns in complete_ns.items():
        if Free(storage) not in steps:  # something is written over it
            continue
        position = steps.index(Free(storage))
        clock_ns, held = _clock(costs, steps), _count_held(problem, steps)
        target, size = position, graph.storages[storage].size_bytes
        while target + 1 < len(steps) and clock_ns[target] < end_ns and held[target + 1] + size <= problem.limit_bytes:
            if steps[target + 1] == Reload(storage, HOST):
                break
            target += 1
        steps.insert(target, steps.pop(position))
    return steps


def _advance_reloads(problem: Problem, steps: list[Step]) -> list[Step]:
    graph, costs, next_ns = problem.graph, problem.costs, float("inf")
    for number in range(sum(isinstance(step, Reload) for step in steps)):
        position = [p for p, step in enumerate(steps) if isinstance(step, Reload)][-1 - number]
        fetch = steps[position]
        assert isinstance(fetch, Reload)
        clock_ns, held = _clock(costs, steps), _count_held(problem, steps)
        size = graph.storages[fetch.storage].size_bytes
        start_ns = min(next_ns, clock_ns[position]) - costs.levels[fetch.level - 1].read_ns(size)
        target = position
        while target > 0 and clock_ns[target - 1] > start_ns and not _concerns(graph, steps[target - 1], fetch):
            freed = steps[target - 1]
            before = held[target - 1] + (graph.storages[freed.storage].size_bytes if isinstance(freed, Free) else 0)
            if before + size > problem.limit_bytes:
                break
            target -= 1
        next_ns = min(max(start_ns, clock_ns[target - 1] if target else 0), next_ns)
        steps.insert(target, steps.pop(position))
    return steps


def _move_to_readers(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """Every fetch right before the step that reads, copies or frees what it fetches."""
    found: list[Step] = []
    waiting: dict[int, Step] = {}
    for step in steps:
        if isinstance(step, Reload):
            waiting[step.storage] = step
            continue
        if waiting:
            form = graph.ops[step.op].form(step.variant) if isinstance(step, Compute) else None
            touched = [graph.storage_of(t) for t in (*form.inputs, *form.outputs)] if form else [step.storage]  # type: ignore[union-attr]
            found += [waiting.pop(s) for s in dict.fromkeys(touched) if s in waiting]
        found.append(step)
    return [*found, *waiting.values()]


def _count_held(problem: Problem, steps: Sequence[Step]) -> tuple[int, ...]:
    return simulate(problem.graph, Schedule(steps=tuple(steps)), problem.costs).bytes_at_step


def _concerns(graph: Graph, step: Step, fetch: Reload) -> bool:
    """Whether a fetch must stay behind this step: fetches keep their order, and what is fetched was sent and let go before."""
    if isinstance(step, Compute):
        return any(graph.storage_of(old) == fetch.storage for _, old in graph.ops[step.op].form(step.variant).inplace_of)
    return isinstance(step, Reload) or step.storage == fetch.storage


def _clock(costs: Costs, steps: Sequence[Step]) -> list[int]:
    """For each step the time at which it ends, if nothing waits for a copy."""
    return list(accumulate(costs.time_ns(s.op, s.variant) if isinstance(s, Compute) else 0 for s in steps))


def measure_waits(problem: Problem, schedule: Schedule) -> dict[int, int]:
    """For each storage that is copied how long ops wait for it, by the judge's clock."""
    graph, costs = problem.graph, problem.costs
    now, out_ns, in_ns = 0, 0, 0
    sent_ns: dict[int, int] = {}
    there_ns: dict[int, int] = {}
    waits: dict[int, int] = {}

    def wait(storage: int, until_ns: int) -> int:
        waits[storage] = waits.get(storage, 0) + max(0, until_ns - now)
        return max(now, until_ns)

    for step in schedule.steps:
        if isinstance(step, Compute):
            form = graph.ops[step.op].form(step.variant)
            for storage in {graph.storage_of(t) for t in form.inputs} & there_ns.keys():
                now = wait(storage, there_ns.pop(storage))
            for storage in {graph.storage_of(old) for _, old in form.inplace_of} & sent_ns.keys():
                now = wait(storage, sent_ns[storage])
            now += costs.time_ns(step.op, step.variant)
        elif isinstance(step, Offload):
            sent_ns[step.storage] = out_ns = max(out_ns, now) + costs.levels[step.level - 1].write_ns(
                graph.storages[step.storage].size_bytes
            )
        elif isinstance(step, Reload):
            start = max(in_ns, now, sent_ns[step.storage])
            there_ns[step.storage] = in_ns = start + costs.levels[step.level - 1].read_ns(graph.storages[step.storage].size_bytes)
        elif step.storage in sent_ns and step.storage not in there_ns:
            now = wait(step.storage, sent_ns[step.storage])
    return waits
