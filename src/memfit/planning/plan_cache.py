"""A planner that remembers: what it found for a step is kept on disk, so that the second start of a training needs no search.

    problem ──key──> found on disk, judged again ──> the same outcome at once
                 └─> nothing there ──> the planner itself ──> kept for the next time

The key is the graph, its costs, the planner with its settings and the time it may take. The budget may differ by half a percent
(libraries hold a little more or less on each start): the plan is then taken if it fits. A broken memory is an empty one, never an error.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.core.cache_folder import warn_once
from memfit.core.errors import MemfitError
from memfit.core.files import write_whole
from memfit.core.io import dumps, loads
from memfit.core.outcome import Outcome, Status
from memfit.core.simulate import simulate
from memfit.planning.problem import Planner, Problem, Progress

_SAME_BUDGET = 0.005
_STOPPED = "stopped"
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlanner:
    """`label` tells apart questions that differ in nothing else: memfit's version, the time limit as it was asked for (not as it was left)."""

    planner: Planner
    folder: Path
    label: str = ""

    @property
    def name(self) -> str:
        return self.planner.name

    def plan(self, problem: Problem) -> Outcome:
        path = self.folder / f"{self._key(problem)}.json"
        known = _read(path, problem)
        if known is not None:
            return known
        stopped: list[str] = []

        def listen(state: Progress) -> None:
            if state.note.startswith(_STOPPED):
                stopped.append(state.note)
            if problem.progress is not None:
                problem.progress(state)

        outcome = self.planner.plan(replace(problem, progress=listen))
        if outcome.plan is not None and not stopped:
            _write(path, outcome)
        return outcome

    def _key(self, problem: Problem) -> str:
        costs = replace(problem.costs, levels=())  # the link to the host is timed anew by each process
        text = f"{problem.graph.digest}\n{dumps(costs)}\n{self.planner!r}\n{self.label}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path, problem: Problem) -> Outcome | None:
    """The outcome kept at `path`, if it answers this problem; its bound only where it is one for this budget."""
    outcome = _load(path)
    if outcome is None or outcome.plan is None or outcome.plan.budget.device_bytes is None:
        return None
    before, now = outcome.plan.budget.device_bytes, problem.limit_bytes
    if abs(before - now) > _SAME_BUDGET * now:
        return None
    try:
        timeline = simulate(problem.graph, outcome.plan.schedule, problem.costs, problem.budget)
    except MemfitError:  # it does not fit this budget
        return None
    plan = replace(outcome.plan, timeline=timeline, budget=problem.budget)
    if before == now:
        return replace(outcome, plan=plan, seconds=problem.seconds)
    bound_ns = outcome.lower_bound_ns if before > now else 0
    gap = (timeline.time_ns - bound_ns) / bound_ns if bound_ns else None
    return replace(
        outcome, plan=plan, status=Status.FEASIBLE, lower_bound_ns=bound_ns, lower_bound_bytes=0, gap_fraction=gap, seconds=problem.seconds
    )


def _load(path: Path) -> Outcome | None:
    try:
        outcome = loads(path.read_bytes(), Outcome, source=path.name)
        assert isinstance(outcome, Outcome)
        return outcome
    except OSError:  # there is none, or writing will say what is wrong
        return None
    except (MemfitError, RecursionError) as error:
        warn_once(f"the plan kept in {path} cannot be read ({type(error).__name__}): it is made again.")
        return None


def _write(path: Path, outcome: Outcome) -> None:
    """Whole or not at all; a folder that cannot be written is said once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(path) as file:
            file.write(dumps(outcome).encode())
        for old in _by_age(path.parent)[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        warn_once(f"plans cannot be kept in {path.parent} ({error.strerror or error}): the next start searches again.")


def _by_age(folder: Path) -> list[Path]:
    """Another process may take files away meanwhile."""
    ages: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            ages.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(ages)]
