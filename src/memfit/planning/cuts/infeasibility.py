"""A proof that a budget is too small: going back from an op that must run, every way ends at values that cannot be there together.

    {x, y} must be there     one of them was made last ─┬─ x, from a and b:  {a, b, y} were there before, and x beside them
                                                        └─ y, from b and c:  {x, b, c} were there before, and y beside them
                             and so on, back to nothing: then there is a way; or each set is over the budget: then there is none

Whatever is there together at some moment, one of it was made last, and just before that its inputs were there beside the others. So an op can
run within a budget exactly if some way back leads to nothing, however often things are made again (a pebble game, played from its end;
Sethi 1975). The sets grow too many where there is room; where there is next to none few are left, and when none is, that is the proof: anybody
can go through the same sets. `model/lower_bounds.py` looks one step back, this as many as it takes.

A way that does lead to nothing is a plan, read backwards, where the op is the step's only result: not a fast one, but one to set out from.

Values whose inputs are all in the set are left out at once: they can be made last, and what remains asks for less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np

from memfit.core.units import format_bytes
from memfit.planning.model.lower_bounds import list_working_sets
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.search.state import Search

Predecessor = tuple[int, tuple[int, ...]]
"""A set of storages, and the forms that ran since it was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveInfeasible:
    """Look for an op that cannot run within the budget; a way back from the only result is a plan instead."""

    name: str = "proof"

    def applies(self, search: Search) -> bool:
        model = search.problem.model
        unsettled = search.may_reorder and not search.done and search.best is None and not search.is_large
        return unsettled and not model.partial and not any(model.takes)

    def run(self, search: Search, seconds: float) -> None:
        go_back(search, seconds=seconds)


@dataclass(frozen=True)
class _Game:
    """The step as bit sets of storages; `runs[s]` has what each form that makes storage s reads, makes, and needs beside that."""

    model: Model
    limit: int
    num_sets: int

    @cached_property
    def runs(self) -> list[list[tuple[int, int, int, int]]]:
        model = self.model
        made = [() if model.arrays.source[s] else forms for s, forms in enumerate(model.producers)]
        return [[(_make_bits(model.ins[f]), _make_bits(model.outs[f]), int(model.arrays.workspace[f]), f) for f in forms] for forms in made]

    @cached_property
    def sizes(self) -> list[int]:
        return [int(size) for size in self.model.arrays.size]

    def count_bytes(self, there: int) -> int:
        return int(self.model.arrays.base_bytes) + sum(self.sizes[s] for s in list_members(there))

    def drop_last_made(self, there: int, forms: tuple[int, ...] = ()) -> Predecessor:
        """Without what can be made last from the rest of it, and `forms` with those that make it, the last one first."""
        waiting = list_members(there)
        while waiting:
            for reads, makes, workspace, form in self.runs[waiting.pop()]:
                if makes & there and not reads & ~there and self.count_bytes(there | makes) + workspace <= self.limit:
                    there, forms = there & ~makes, (*forms, form)
                    waiting = list_members(there)
        return there, forms

    def step_back(self, there: int) -> list[Predecessor]:
        """The sets of which one was there before, and what ran since then, the smallest last; nothing over the limit."""
        found = []
        for s in list_members(there):
            for reads, makes, workspace, form in self.runs[s]:
                if self.count_bytes(there | reads | makes) + workspace <= self.limit:
                    found.append(self.drop_last_made((there & ~makes) | reads, (form,)))
        return sorted(found, key=lambda step: self.count_bytes(step[0]), reverse=True)

    def find_way_back(self, there: int, stop: float) -> tuple[int, Ints | None]:
        """How many sets were looked at, and a sequence that makes `there` from nothing.

        None where there is none, which is the proof; an empty one where nobody knows after so many sets or so long.
        """
        if self.count_bytes(there) > self.limit:
            return 1, None
        first, forms = self.drop_last_made(there)
        came: dict[int, Predecessor] = {first: (-1, forms)}
        waiting = [first]
        while waiting:
            here = waiting.pop()
            if not any(self.runs[s] for s in list_members(here)):
                return len(came), _read_backwards(came, here)
            if len(came) > self.num_sets or perf_counter() > stop:
                return len(came), np.empty(0, np.int64)
            for step, since in self.step_back(here):
                if step not in came:
                    came[step] = (here, since)
                    waiting.append(step)
        return len(came), None


def _read_backwards(came: dict[int, Predecessor], here: int) -> Ints:
    """What ran on the way to `here`, in the order in which it runs."""
    forms: list[int] = []
    while here >= 0:
        here, since = came[here]
        forms.extend(reversed(since))
    return np.array(forms, np.int64)


def go_back(search: Search, *, seconds: float) -> None:
    """Go back from the only result and from the ops that need most, until one proves that there is no plan, or is one."""
    model, limit, numbers = search.problem.model, search.problem.limit_bytes, search.settings.proof
    game, stop = _Game(model, limit, numbers.num_sets), perf_counter() + seconds
    demanding = [storage for _, storage in list_working_sets(model)]
    results = [storage for storage in demanding if model.arrays.pinned[storage]]
    for storage in (*(results if len(results) == 1 else ()), *demanding[: numbers.num_ops]):
        forms = model.producers[storage]
        if len(forms) != 1 or perf_counter() > stop:
            continue
        count, sequence = game.find_way_back(_make_bits((*model.ins[forms[0]], *model.outs[forms[0]])), stop)
        if sequence is None:
            search.proof = (
                f"{format_bytes(limit)} ({limit} bytes) is too little for {model.describe(forms[0])}: going back from what it reads and makes, "
                f"whichever value was made last, every way ends where more must be there together ({count} sets of values looked at)."
            )
            return
        if set(model.agenda) <= set(map(int, sequence)):
            search.found_way_back = search.repair(sequence, search.makers, "a way back")
            return


def _make_bits(storages: tuple[int, ...]) -> int:
    return sum(1 << s for s in set(storages))


def list_members(there: int) -> list[int]:
    found = []
    while there:
        low = there & -there
        found.append(low.bit_length() - 1)
        there ^= low
    return found
