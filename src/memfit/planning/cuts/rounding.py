"""From a cut LP's solution to a sequence: which forms run, what is kept at the cut, and by what the rest comes back.

The LP is rounded (k > 1/2 is kept). Which producer makes a storage, before a cut and after it, is the one the LP runs most
there; a graph without alternatives has no such choice and gets its plain agenda. A whole solution is played as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.planning.cuts.just_in_time import keep_at
from memfit.planning.cuts.program import CutSolution
from memfit.planning.model.inplace_forms import find_siblings
from memfit.planning.model.reduce import Floats, Ints, Model

_HALF = 0.5
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """`makers[s]` is the form that remakes storage s: the repair uses the same ones."""

    sequence: Ints
    makers: Ints


def seeds_from(model: Model, solution: CutSolution, rank: Ints | None = None) -> Iterator[Seed]:
    """The solution played in the order of its stages, and in the step's own order where that is another one.

    With `rank`, where each form stands in an order that holds less, that order takes the place of the step's own inside stages.

    The program is free in its order: what does not descend from a cut may run on either side of it, and where it put an op is
    part of why its values are cheap. The step's own order has less to say for it, but is never against the judge's rules.
    """
    plain = find_siblings(model).plain
    after = solution.again + 1e-3 * solution.runs[0]
    again, first, *staged_makers = (
        np.where(makers >= 0, plain[makers], makers)
        for makers in (
            choose_makers(model, after),
            choose_makers(model, _weigh_firsts(solution) if _is_whole(solution) else solution.total),
            *(choose_makers(model, runs + 1e-3 * after) for runs in solution.runs),
        )
    )
    agenda = make_agenda(model, first)
    calm = agenda if rank is None else agenda[np.argsort(rank[agenda], kind="stable")]
    staged = calm[np.argsort(_find_stages(model, solution, plain)[calm], kind="stable")]
    kept = [np.flatnonzero(keep > _HALF) for keep in solution.keep]
    for order in (staged, agenda) if not np.array_equal(staged, agenda) else (agenda,):
        turns = [_find_turn(model, order, cut) for cut in solution.cuts]
        yield Seed(sequence=keep_at(model, turns, kept, order, np.stack(staged_makers)), makers=again)


def _is_whole(solution: CutSolution) -> bool:
    return all(bool((np.abs(values - np.round(values)) < _CLOSE).all()) for values in (*solution.keep, *solution.runs))


def _weigh_firsts(solution: CutSolution) -> Floats:
    """The earlier a form first runs the greater its weight, 0 where it does not."""
    weight = np.zeros(len(solution.runs[0]))
    for j in reversed(range(len(solution.runs))):
        if j < len(solution.at):
            weight[solution.at[j] > _HALF] = 2 * (len(solution.runs) - j) - 1
        weight[solution.runs[j] > _HALF] = 2 * (len(solution.runs) - j)
    return weight


def _find_stages(model: Model, solution: CutSolution, plain: Ints) -> Ints:
    """The stage each form first runs in, in place or not: 2 j before cut j, 2 j + 1 at it."""
    first = np.full(model.num_forms, 2 * len(solution.cuts), np.int64)
    for j in reversed(range(len(solution.cuts))):
        first[list(model.producers[solution.cuts[j]])] = 2 * j + 1
        first[solution.runs[j] > _HALF] = 2 * j
    np.minimum.at(first, plain, first.copy())
    return first


def choose_makers(model: Model, weight: Floats) -> Ints:
    """For each storage the producer with the greatest weight; the default one among equals."""
    makers = np.full(model.num_storages, -1, np.int64)
    for s, forms in enumerate(model.producers):
        if forms:
            makers[s] = max(forms, key=lambda f: (round(float(weight[f]), 6), -forms.index(f))) if len(forms) > 1 else forms[0]
    return makers


def make_agenda(model: Model, makers: Ints) -> Ints:
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


def _find_turn(model: Model, agenda: Ints, cut: int) -> int:
    makers = set(model.producers[cut])
    for i, f in enumerate(agenda):
        if int(f) in makers:
            return i
    return len(agenda) - 1
