"""Plans kept on disk: found again for the same question, never for another one, never trusted unjudged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.small import training_chain

from memfit.core.budget import Budget
from memfit.core.costs import Level, uniform_costs
from memfit.core.outcome import Outcome
from memfit.planning import Problem, find_planner
from memfit.planning.plan_cache import CachedPlanner
from memfit.planning.problem import Planner


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A planner that notes how often it was asked; its name and settings are those of the one inside."""

    inner: Planner = field(default_factory=lambda: find_planner("greedy"))
    asked: list[int] = field(default_factory=list, repr=False)
    note: str = ""

    @property
    def name(self) -> str:
        return self.inner.name

    def plan(self, problem: Problem) -> Outcome:
        self.asked.append(problem.limit_bytes)
        if self.note:
            problem.tell(None, 0, self.note)
        return self.inner.plan(problem)


def problem(fraction: float = 0.7) -> Problem:
    graph = training_chain(12)
    costs = uniform_costs(graph)
    whole = find_planner("keep_all").plan(Problem(graph=graph, costs=costs, budget=Budget())).require_plan()
    return Problem(graph=graph, costs=costs, budget=Budget(device_bytes=int(fraction * whole.timeline.peak_bytes)))


def test_the_second_question_is_answered_from_disk(tmp_path: Path) -> None:
    planner = Counting()
    first = CachedPlanner(planner=planner, folder=tmp_path).plan(problem())
    second = CachedPlanner(planner=planner, folder=tmp_path).plan(problem())
    assert len(planner.asked) == 1
    assert first.plan is not None
    assert second.plan is not None
    assert second.plan.schedule == first.plan.schedule
    assert (second.status, second.lower_bound_ns) == (first.status, first.lower_bound_ns)


def test_other_costs_budgets_and_limits_are_other_questions(tmp_path: Path) -> None:
    planner, one = Counting(), problem()
    CachedPlanner(planner=planner, folder=tmp_path).plan(one)
    CachedPlanner(planner=planner, folder=tmp_path, label="3 s").plan(one)
    CachedPlanner(planner=planner, folder=tmp_path).plan(problem(0.8))
    slower = replace(one.costs, op_time_ns=tuple(2 * t for t in one.costs.op_time_ns))
    CachedPlanner(planner=planner, folder=tmp_path).plan(replace(one, costs=slower))
    assert len(planner.asked) == 4


def test_a_budget_that_is_almost_the_same_takes_the_plan_if_it_fits_but_not_the_bound(tmp_path: Path) -> None:
    planner, one = Counting(), problem()
    found = CachedPlanner(planner=planner, folder=tmp_path).plan(one)
    assert found.plan is not None
    larger = replace(one, budget=Budget(device_bytes=one.limit_bytes + 1))
    again = CachedPlanner(planner=planner, folder=tmp_path).plan(larger)
    assert len(planner.asked) == 1
    assert again.plan is not None
    assert again.plan.budget == larger.budget
    assert again.lower_bound_ns == 0
    smaller = replace(one, budget=Budget(device_bytes=found.plan.timeline.peak_bytes - 1))
    CachedPlanner(planner=planner, folder=tmp_path).plan(smaller)
    assert len(planner.asked) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"memfit": "plan"}', "[1, 2]"])
def test_a_broken_memory_is_an_empty_one(tmp_path: Path, damage: str) -> None:
    planner = Counting()
    CachedPlanner(planner=planner, folder=tmp_path).plan(problem())
    for file in tmp_path.glob("*.json"):
        file.write_text(damage)
    assert CachedPlanner(planner=planner, folder=tmp_path).plan(problem()).plan is not None
    assert len(planner.asked) == 2


def test_a_schedule_that_was_changed_is_judged_again(tmp_path: Path) -> None:
    planner = Counting()
    CachedPlanner(planner=planner, folder=tmp_path).plan(problem())
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    data["plan"]["schedule"]["steps"].pop(0)
    data["plan"]["timeline"]["bytes_at_step"].pop(0)
    file.write_text(json.dumps(data))
    assert CachedPlanner(planner=planner, folder=tmp_path).plan(problem()).plan is not None
    assert len(planner.asked) == 2


def test_what_was_stopped_is_not_kept(tmp_path: Path) -> None:
    planner = Counting(note="stopped: the best plan so far is kept")
    CachedPlanner(planner=planner, folder=tmp_path).plan(problem())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert CachedPlanner(planner=Counting(), folder=file / "plans").plan(problem()).plan is not None


def test_costs_without_levels_have_the_same_key(tmp_path: Path) -> None:
    """The link to the host is timed by every process: its figure must not make a plan unknown."""
    planner, one = Counting(), problem()
    CachedPlanner(planner=planner, folder=tmp_path).plan(one)
    linked = replace(one.costs, levels=(Level(write_bytes_per_s=1e9, read_bytes_per_s=1e9),))
    CachedPlanner(planner=planner, folder=tmp_path).plan(replace(one, costs=linked))
    assert len(planner.asked) == 1
