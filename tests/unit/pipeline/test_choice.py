"""How the time for planning is shared out among the forms of a step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.small import training_chain

from memfit.core.budget import Budget
from memfit.core.costs import uniform_costs
from memfit.core.outcome import Outcome
from memfit.pipeline import choice
from memfit.pipeline.choice import PlanSettings, choose_plan
from memfit.pipeline.costs import Costed
from memfit.report.progress import Progress


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every search was given."""
    given: list[float] = []
    plan_form = choice.plan_form

    def note(*args: Any, time_limit_s: float, **more: Any) -> Outcome:
        given.append(round(time_limit_s, 6))
        return plan_form(*args, time_limit_s=time_limit_s, **more)

    monkeypatch.setattr(choice, "plan_form", note)
    return given


def forms(count: int, made: list[int]) -> Iterator[Costed]:
    for number in range(count):
        made.append(number)
        captured: Any = SimpleNamespace(graph=training_chain(8))
        yield Costed(name=str(number), captured=captured, costs=uniform_costs(training_chain(8)))


def peak() -> int:
    graph = training_chain(8)
    return choice.find_plan(graph, uniform_costs(graph), None, planner="keep_all").require_plan().timeline.peak_bytes


def search(count: int, budget: int, **settings: Any) -> list[int]:
    made: list[int] = []
    with Progress("test") as progress:
        choose_plan(forms(count, made), Budget(device_bytes=budget), PlanSettings(time_limit_s=2.0, **settings), progress)
    return made


def test_the_only_form_has_all_the_time(seconds: list[float]) -> None:
    assert search(1, peak() - 1, compare_all=True) == [0]
    assert seconds == [2.0]


def test_two_forms_share_it(seconds: list[float]) -> None:
    assert search(2, peak() - 1, compare_all=True) == [0, 1]
    assert seconds[:2] == [0.3, 0.3]


def test_a_step_that_fits_has_no_second_form_made(seconds: list[float]) -> None:
    assert search(2, peak(), compare_all=True) == [0]
    assert len(seconds) == 1


def test_forms_made_only_if_needed_are_not_made_before(seconds: list[float]) -> None:
    assert search(3, peak() - 1) == [0, 1]
