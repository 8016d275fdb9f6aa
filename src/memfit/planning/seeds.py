"""From a cut LP's solution to a sequence: which forms run, what is kept at the cut, and by what the rest comes back.

The LP is rounded (k > 1/2 is kept). Which producer makes a storage, before the cut and after it, is the one the LP runs
most; a graph without alternatives has no such choice and gets its plain agenda.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.planning.cut_lp import CutSolution
from memfit.planning.just_in_time import keep_at
from memfit.planning.model import Floats, Ints, Model

_HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """`makers[s]` is the form that remakes storage s: the repair uses the same ones."""

    sequence: Ints
    makers: Ints


def seed_from(model: Model, solution: CutSolution) -> Seed:
    first = chosen_makers(model, solution.before + solution.at + solution.after)
    again = chosen_makers(model, solution.after + 1e-3 * solution.before)
    agenda = agenda_for(model, first)
    turns = [_turn(model, agenda, cut) for cut in solution.cuts]
    kept = [np.flatnonzero(keep > _HALF) for keep in solution.keep]
    return Seed(sequence=keep_at(model, turns, kept, agenda, again), makers=again)


def chosen_makers(model: Model, weight: Floats) -> Ints:
    """For each storage the producer with the greatest weight; the default one among equals."""
    makers = np.full(model.num_storages, -1, np.int64)
    for s, forms in enumerate(model.producers):
        if forms:
            makers[s] = max(forms, key=lambda f: (round(float(weight[f]), 6), -forms.index(f))) if len(forms) > 1 else forms[0]
    return makers


def agenda_for(model: Model, makers: Ints) -> Ints:
    """The forms that the results need under these makers, and what is never left out, in op order."""
    a = model.arrays
    have = a.source.copy()
    chosen = {f for f in model.agenda if a.seeded[f] or not a.replayable[f]}
    wanted = [int(s) for s in np.flatnonzero(a.pinned)] + [s for f in chosen for s in model.ins[f]]
    while wanted:
        s = wanted.pop()
        if have[s]:
            continue
        have[s] = True
        f = int(makers[s])
        if f >= 0 and f not in chosen:
            chosen.add(f)
            wanted.extend(model.ins[f])
    return np.array(sorted(chosen), np.int64)


def _turn(model: Model, agenda: Ints, cut: int) -> int:
    makers = set(model.producers[cut])
    for i, f in enumerate(agenda):
        if int(f) in makers:
            return i
    return len(agenda) - 1
