"""The first plan on a machine: kernels are compiled side by side in processes of their own, best while the model is still being traced.

    this process     trace the model ───────────────┬─ wait for the rest ─ load from disk ─> plan
    repair           compile ── write to the cache ─┤      each ends when it is done, and at once when this process is gone
    everything else  compile ── write to the cache ─┘

Only where the cache on disk has not got them. Where no process can be started, or nothing can be written, kernels are compiled when they are
called, here, as ever: what these processes do can help but not harm, and nothing they say is heard.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from memfit.core.budget import Budget
from memfit.core.cache_folder import cache_folder, is_cache_chosen
from memfit.core.costs import uniform_costs
from memfit.core.graph import Graph, Op, Storage, Tensor
from memfit.jit.kernel import is_cached
from memfit.offsets.from_schedule import with_layout
from memfit.offsets.greedy import _best_fit
from memfit.planning.annealing.anneal import anneal
from memfit.planning.annealing.beam import make_beam_tables, search_beam
from memfit.planning.baselines.keep_all import KeepAll
from memfit.planning.cuts.just_in_time import build, default_makers, keep_at
from memfit.planning.model.fast_judge import drop_dead, measure, peak_and_time
from memfit.planning.model.inplace_forms import overwrite
from memfit.planning.model.precedence import find_precedence
from memfit.planning.problem import Problem
from memfit.planning.search.drop_repeats import delete, try_deletions
from memfit.planning.search.neighbourhood import find_move_target
from memfit.planning.search.reorder import lower_peak, move_ops
from memfit.planning.search.repair import Repairer, judge_insertions, list_insertions
from memfit.planning.search.repair_kernel import find_idle, insert_forms, repair

KERNELS: dict[str, tuple[Any, ...]] = {
    "repair": (repair,),
    "annealing": (anneal,),
    "beam": (search_beam,),
    "rest": (
        *(measure, drop_dead, overwrite, try_deletions, build, move_ops, find_move_target, _best_fit),
        *(find_idle, insert_forms, list_insertions, judge_insertions),  # for sequences that overwrite
    ),
}
"""What each process compiles, of about equal length; annealing and the beam where they are called for."""

_LEAST_CORES = 2
_lock = threading.Lock()
_jobs: list[subprocess.Popen[bytes]] = []
_asked: set[str] = set()
ALWAYS = ("repair", "rest")
"""What nearly every first plan calls."""


def start_compiling(names: tuple[str, ...] = ALWAYS) -> None:
    """Begin to compile what the cache has not got; returns at once, and does nothing the second time."""
    with _lock:
        missing = [name for name in names if name not in _asked and not all(map(is_cached, KERNELS[name]))]
        _asked.update(names)
        if missing and _may_start_processes():
            atexit.register(_stop, os.getpid())
            _jobs.extend(job for job in map(_start, missing) if job is not None)


def prepare_kernels(problem: Problem, names: tuple[str, ...] = ALWAYS) -> Problem:
    """The problem, once its kernels are compiled; its clock stands still meanwhile: a time limit is one for planning."""
    start_compiling(names)
    if not _jobs:
        return problem
    began = perf_counter()
    problem.tell(None, 0, "compiling the planner, once on this machine")
    try:
        while _jobs:
            _jobs[-1].wait()
            _jobs.pop()
    except BaseException:
        _stop(os.getpid())
        raise
    return replace(problem, started_s=problem.started_s + perf_counter() - began, built=problem.model)


def compile_now(name: str) -> None:
    """What one process does: call its kernels as planners do, on a step of four ops."""
    for function in KERNELS[name]:
        function.compile_always()
    problem = _small_problem()
    model = problem.model
    a, sequence, makers = model.arrays, np.array(model.agenda, np.int64), default_makers(model)
    peak, _ = peak_and_time(a, sequence)
    if name == "repair":
        Repairer(arrays=a, limit=peak - 1, maker=makers).run(sequence, 2)
        return
    if name == "annealing":
        anneal(a, sequence, peak, 0, 1, np.ones(4), 0, np.zeros(1, np.int64))
        return
    if name == "beam":
        search_beam(a, make_beam_tables(model, sequence), peak, 1, 1, 0.0, True, 0, 0, np.zeros(1, np.int64))
        return
    Repairer(arrays=a, limit=peak - 1, maker=makers).run_judging(sequence, 2)
    overwrite(a, sequence, np.full(model.num_forms, -1, np.int64))
    delete(a, drop_dead(a, sequence), peak, np.arange(1))
    keep_at(model, (2,), ((),))
    lower_peak(find_precedence(model), sequence, peak - 1, seconds=0.01)
    find_move_target(a, sequence, 1, True)
    with_layout(problem.graph, KeepAll().plan(problem).require_plan())


def _small_problem() -> Problem:
    reads: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2, 0))
    ops = tuple(Op(id=i, name="op", inputs=inputs, outputs=(i,)) for i, inputs in enumerate(reads))
    storages = tuple(Storage(id=i, size_bytes=8) for i in range(4))
    graph = Graph(ops=ops, tensors=tuple(Tensor(id=i, storage=i) for i in range(4)), storages=storages, sources=(), results=(3,))
    return Problem(graph=graph, costs=uniform_costs(graph), budget=Budget())


def _may_start_processes() -> bool:
    """Two cores, and an interpreter that is one: in a program that embeds Python `sys.executable` is that program."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores >= _LEAST_CORES and Path(sys.executable or "").name.lower().startswith("python")


_CODE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
sys.path[:] = {path!r}
from memfit.planning.jit.warm_up import compile_now
compile_now({name!r})
os._exit(0)
"""
"""The end of its input is the end of the process that started it."""


def _start(name: str) -> subprocess.Popen[bytes] | None:
    nothing = subprocess.DEVNULL
    code = _CODE.format(path=sys.path, name=name)
    env = {**os.environ, "MEMFIT_CACHE_DIR": str(cache_folder())} if is_cache_chosen() else None  # the very folder that this process reads
    try:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, env=env)
    except OSError:
        return None


def _stop(pid: int) -> None:
    """End what still runs; a forked copy of this process has started nothing."""
    while _jobs and pid == os.getpid():
        _jobs.pop().kill()
