"""Kernels compiled ahead in other processes: only when needed, waited for, never left behind, and the right ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.planning.jit import warm_up as compile_ahead
from memfit.planning.jit.warm_up import ALWAYS, KERNELS, prepare_kernels, start_compiling
from memfit.planning.problem import Problem, Progress

ROOT = Path(__file__).parents[4]
_SLEEPS = compile_ahead._CODE.split("sys.path")[0] + "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """As in a process that has not asked yet, on a machine with cores to spare and nothing in its cache."""
    monkeypatch.setattr(compile_ahead, "_asked", set())
    monkeypatch.setattr(compile_ahead, "_jobs", [])
    monkeypatch.setattr(compile_ahead, "is_cached", lambda kernel: False)
    monkeypatch.setattr(compile_ahead, "_may_start_processes", lambda: True)
    monkeypatch.setattr(compile_ahead, "_CODE", "pass")
    yield
    compile_ahead._stop(os.getpid())


def _problem(progress=None) -> Problem:  # type: ignore[no-untyped-def]
    graph = compile_ahead._small_problem().graph
    return Problem(graph=graph, costs=uniform_costs(graph), budget=Budget(device_bytes=10), progress=progress)


def test_nothing_is_started_where_everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "is_cached", lambda kernel: True)
    problem = _problem()
    assert prepare_kernels(problem) is problem


def test_only_what_is_missing_is_compiled_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "is_cached", lambda kernel: kernel not in KERNELS["repair"])
    start_compiling()
    assert len(compile_ahead._jobs) == 1
    start_compiling()
    assert len(compile_ahead._jobs) == 1


@pytest.mark.parametrize("executable", ["", None, "/opt/game/game.exe"])
def test_no_process_from_a_program_that_embeds_python(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", executable)
    assert not compile_ahead._may_start_processes()


def test_where_no_process_can_be_started_planning_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    problem = _problem()
    assert prepare_kernels(problem) is problem


def test_the_clock_stands_still_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_CODE", "import time; time.sleep(0.5)")
    heard: list[Progress] = []
    problem = _problem(heard.append)
    later = prepare_kernels(problem)
    assert later.started_s - problem.started_s >= 0.5
    assert later.model is problem.model
    assert [p.note for p in heard] == ["compiling the planner, once on this machine"]
    assert not compile_ahead._jobs


def test_a_process_that_fails_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_CODE", "raise SystemExit(3)")
    assert prepare_kernels(_problem()).budget == Budget(device_bytes=10)


def test_an_interrupt_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_CODE", _SLEEPS)
    start_compiling()
    jobs = list(compile_ahead._jobs)

    def interrupted(self: object, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_kernels(_problem())
    assert len(jobs) == len(ALWAYS)
    assert all(job.wait(timeout=20) != 0 for job in jobs)


def test_processes_end_with_the_one_that_started_them() -> None:
    """Even when that one is killed."""
    code = (
        f"import os; from memfit.planning.jit import warm_up as c; c.is_cached = lambda k: False; c._CODE = {_SLEEPS!r}\n"
        "c._may_start_processes = lambda: True; c.start_compiling(); print(*(j.pid for j in c._jobs), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == len(ALWAYS)
    patience = time.monotonic() + 20
    while any(map(_runs, pids)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


_SAME_TYPES = """
from memfit.planning import plan
from memfit.planning.jit import warm_up as c
from tests.strategies import FULL, random_costs, random_graph
from random import Random
for name in c.KERNELS:
    c.compile_now(name)
kernels = [k.compiled for group in c.KERNELS.values() for k in group]
assert all(len(k.overloads) == 1 for k in kernels), [(k.__name__, len(k.overloads)) for k in kernels]
rng = Random(1)
graph = random_graph(rng, FULL)
costs = random_costs(rng, graph, max_levels=0)
peak = plan(graph, costs, planner="keep_all").require_plan().timeline.peak_bytes
plan(graph, costs, int(0.8 * peak), time_limit_s=1)
assert all(len(k.overloads) == 1 for k in kernels), [(k.__name__, len(k.overloads)) for k in kernels]
"""


def test_what_is_compiled_is_what_planners_call() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", _SAME_TYPES], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


_COLD = """
from memfit.planning.jit import warm_up as c
c._may_start_processes = lambda: True
kernels = [k for group in c.KERNELS.values() for k in group]
assert not any(map(c.is_cached, kernels))
c.with_kernels(c._small_problem())
assert all(map(c.is_cached, kernels)) and not c._jobs
for name in c.KERNELS:
    c.compile_now(name)
print(sum(sum(k.compiled.stats.cache_misses.values()) for k in kernels), sum(sum(k.compiled.stats.cache_hits.values()) for k in kernels) > 5)
"""


@pytest.mark.slow
def test_an_empty_cache_is_filled_by_others(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _COLD], capture_output=True, text=True, env=env)
    assert (done.stdout.split(), done.stderr) == (["0", "True"], "")
