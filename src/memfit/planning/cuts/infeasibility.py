"""A proof that a budget is too small: going back from an op that must run, every way ends at values that cannot be there together.

    {x, y} must be there     one of them was made last ─┬─ x, from a and b:  {a, b, y} were there before, and x beside them
                                                        └─ y, from b and c:  {x, b, c} were there before, and y beside them
                             and so on, back to nothing: then there is a way; or each set is over the budget: then there is none

Of the values held at some moment one was made last, and just before that its inputs were held beside the others. So an op can run
within a budget exactly if some way back leads to the empty set, however often values are made again (a pebble game played from its
end; Sethi 1975). With much room there are too many sets to visit. With little room there are few, and when all are visited without
reaching the empty set, that is the proof; anybody can check it by visiting the same sets. `model/lower_bounds.py` looks back once,
this file as often as it takes.

If the op makes the step's only result, a way back to the empty set is a plan, read backwards: not a fast one, but a start.

A value whose inputs are all in the set is removed at once: it can be made last, and what remains needs less memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np

from memfit.core.units import format_bytes
from memfit.planning.model.lower_bounds import list_members, list_working_sets
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.search.state import Search

Predecessor = tuple[int, tuple[int, ...]]
"""An earlier set of storages, and the forms that lead from it to the later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveInfeasible:
    """Look for an op that cannot run within the budget, or find a plan on the way."""

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
        """Remove from the set what the rest of it can make last; `forms` gets those that make it, the last one first."""
        waiting = list_members(there)
        while waiting:
            for reads, makes, workspace, form in self.runs[waiting.pop()]:
                if makes & there and not reads & ~there and self.count_bytes(there | makes) + workspace <= self.limit:
                    there, forms = there & ~makes, (*forms, form)
                    waiting = list_members(there)
        return there, forms

    def list_predecessors(self, there: int) -> list[Predecessor]:
        """The sets from which `there` can be reached by one form inside the limit, the smallest last."""
        found = []
        for s in list_members(there):
            for reads, makes, workspace, form in self.runs[s]:
                if self.count_bytes(there | reads | makes) + workspace <= self.limit:
                    found.append(self.drop_last_made((there & ~makes) | reads, (form,)))
        return sorted(found, key=lambda step: self.count_bytes(step[0]), reverse=True)

    def find_way_back(self, there: int, stop: float) -> tuple[int, Ints | None]:
        """How many sets were visited, and a sequence that makes `there` from nothing.

        The sequence is None if there is none, which is the proof, and empty if the search gave up.
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
            for before, since in self.list_predecessors(here):
                if before not in came:
                    came[before] = (here, since)
                    waiting.append(before)
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
