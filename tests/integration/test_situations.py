"""A part of the generated situations of `benchmarks/parts/guards/situations.py`, spread over all of them: none may be wrong, an alarm or a crash."""

from __future__ import annotations

import warnings
from collections import defaultdict

import pytest
import torch
from benchmarks.parts.guards.situations import Situation, run, situations

EVERY = 29  # a prime: the part meets every kind of change, and every subject


def _part() -> list[Situation]:
    by_subject: dict[str, list[Situation]] = defaultdict(list)
    for situation in situations():
        by_subject[situation.subject.partition(" ")[0]].append(situation)
    return [s for number, found in enumerate(by_subject.values()) for s in found[number::EVERY]]


@pytest.mark.parametrize("situation", _part(), ids=lambda s: s.name)
def test_nothing_is_silently_wrong(situation: Situation) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = run(situation)
    assert row["verdict"] in ("SAME", "REFUSED"), row["why"]


def test_there_are_enough_of_them_and_no_two_are_one() -> None:
    names = [s.name for s in situations()]
    assert len(names) >= 250
    assert len(set(names)) == len(names)
