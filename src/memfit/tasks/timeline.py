"""A scheduling outcome as values over time, for those who draw: runs of tasks, and the memory held."""

from __future__ import annotations

from memfit.tasks.graph import TaskGraph
from memfit.tasks.judge import ParallelProfile, Run, judge_order
from memfit.tasks.outcome import TaskOutcome


def list_runs(graph: TaskGraph, outcome: TaskOutcome) -> tuple[Run, ...]:
    """The runs of a parallel schedule; on one processor the tasks of the order, one after another."""
    if outcome.runs:
        return outcome.runs
    runs, now = [], 0.0
    for task in outcome.order:
        runs.append(Run(task, now, now + float(graph.time[task])))
        now = runs[-1].stop
    return tuple(runs)


def memory_over_time(graph: TaskGraph, outcome: TaskOutcome) -> tuple[list[float], list[int]]:
    """Instants and the bytes held from each of them on. With spilling: what is held during each task."""
    if isinstance(outcome.profile, ParallelProfile):
        return list(outcome.profile.times), list(outcome.profile.bytes_held)
    runs = list_runs(graph, outcome)
    if outcome.spill is not None:
        return [r.start for r in runs], _replay_spilling(graph, outcome)
    profile = outcome.profile or judge_order(graph, list(outcome.order))
    return [r.start for r in runs], profile.bytes_at_step.tolist()


def _replay_spilling(graph: TaskGraph, outcome: TaskOutcome) -> list[int]:
    assert outcome.spill is not None
    pending = list(outcome.spill.transfers[::-1])
    left, size = graph.readers.counts.tolist(), graph.item_bytes.tolist()
    held, found = graph.initial_bytes, []
    for step, task in enumerate(outcome.order):
        while pending and pending[-1].step == step:
            move = pending.pop()
            held += -move.size_bytes if move.out else move.size_bytes
        held += int(graph.output_bytes[task])
        found.append(held + int(graph.memory_bytes[task]))
        for item in graph.reads.of(task):
            left[item] -= 1
        for item in (*graph.reads.of(task), *graph.makes.of(task)):
            if left[item] == 0 and not graph.item_kept[item]:
                held -= size[item]
    return found
