"""The instructions of a chain, as the papers write them; `to_core.py` spells them out as the core's steps.

    Write(0, 1)  Advance(0, 7)  Back(7)  Read(0, 1)  Advance(0, 6)  Back(6)  ...

A move is a small tuple, because a chain of 100,000 steps takes some 500,000 of them. Tell moves apart by their type, never by
equality alone: as tuples, Advance(0, 1) == Drop(0, 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Advance(NamedTuple):
    """F_start … F_{stop-1}: the working buffer goes from x_start to x_stop."""

    start: int
    stop: int


class Back(NamedTuple):
    """B_step: uses up the state in the working buffer."""

    step: int


class Write(NamedTuple):
    """Copy the working buffer, which holds x_step, to a level."""

    step: int
    level: int


class Read(NamedTuple):
    """Copy x_step from a level to the working buffer."""

    step: int
    level: int


class Drop(NamedTuple):
    """Forget a level's copy of x_step."""

    step: int
    level: int


Move = Advance | Back | Write | Read | Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often a schedule does what: `writes[k]` and `reads[k]` are for level k."""

    num_forward: int
    num_backward: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]


def count_moves(moves: Iterable[Move], num_levels: int) -> Counts:
    forward = backward = 0
    writes: Counter[int] = Counter()
    reads: Counter[int] = Counter()
    for move in moves:
        kind = type(move)
        if kind is Advance:
            forward += move[1] - move[0]  # type: ignore[misc]
        elif kind is Back:
            backward += 1
        elif kind is Write:
            writes[move[1]] += 1  # type: ignore[misc]
        elif kind is Read:
            reads[move[1]] += 1  # type: ignore[misc]
    levels = range(num_levels)
    return Counts(
        num_forward=forward, num_backward=backward, writes=tuple(writes[k] for k in levels), reads=tuple(reads[k] for k in levels)
    )
