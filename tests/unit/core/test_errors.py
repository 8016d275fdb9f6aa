"""Errors: one base class, one printable line, and they survive a trip through a process pool."""

from __future__ import annotations

import pickle

import pytest

from memfit.core.errors import BadInput, IllegalSchedule, InfeasibleBudget, MemfitError, NoPlanFound, Unsupported, one_line


@pytest.mark.parametrize(
    "error",
    [
        BadInput("bad"),
        IllegalSchedule(3, "reads what is gone"),
        InfeasibleBudget("6 is below 7", minimum_bytes=7),
        NoPlanFound("gave up"),
        Unsupported("no"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_every_error_has_the_base_class_and_survives_pickling(error: MemfitError) -> None:
    assert isinstance(error, MemfitError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_users_can_catch_the_usual_python_classes() -> None:
    assert issubclass(BadInput, ValueError)
    assert issubclass(IllegalSchedule, ValueError)
    assert issubclass(InfeasibleBudget, ValueError)
    assert issubclass(NoPlanFound, RuntimeError)


def test_illegal_schedule_names_the_step_and_the_cause() -> None:
    assert str(IllegalSchedule(12, "frees twice")) == "illegal schedule at step 12: frees twice"
    assert "the end of the schedule" in str(IllegalSchedule(-1, "never produces result tensor 3"))


def test_a_message_is_one_printable_line_whatever_names_it_quotes() -> None:
    message = str(BadInput("op 3 (evil\n\x1b[31m\ud800\u202e) is bad"))
    assert message.isprintable()
    assert message == "op 3 (evil\\n\\x1b[31m\\ud800\\u202e) is bad"
    assert one_line("naïve – schön") == "naïve – schön"
