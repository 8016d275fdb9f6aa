"""Milestones: some links of a long recomputation are kept, so that it starts again from the nearest one.

    keep set of the cut LP      x0 . . . . . . . x8     backward needs x7 first: x1 ... x7 come back at once and wait for their turn
    with milestones kept        x0 . . x3 . . x6 . .    x7 from x6 alone, later x5 from x3: two wait instead of seven

One cut sees neither the order in which values come back nor the room they need while they wait, so where dropped values hang
on each other (the residual stream of a deep network) its seeds hold far too much just after the turn. What waits there is read
off the played seed; every second, third, ... link of it is kept by force, and the program chooses the rest anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memfit.planning.cuts.near_peak import first_program
from memfit.planning.cuts.program import CutProgram, CutSolution
from memfit.planning.cuts.rounding import Seed, seeds_from
from memfit.planning.model.fast_judge import INVALID, peak_and_time, usage_of
from memfit.planning.model.reduce import Ints
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """Seeds of the first cut that keep milestones of what would come back link by link."""

    name: str = "milestones"

    def applies(self, search: Search) -> bool:
        needless = search.began_without_variants and search.best is not None  # what this gives came with the plan without variants
        return not needless and not search.done and not search.good_enough

    def run(self, search: Search, seconds: float) -> None:
        program = first_program(search.problem.model)
        if program is not None:
            keep_milestones(search, program, seconds=seconds)


def keep_milestones(search: Search, program: CutProgram, *, seconds: float) -> None:
    """Solve the program with every few links of its recomputations kept; repair what comes out."""
    stop, numbers = search.problem.seconds + seconds, search.settings.milestones
    found = _play(search, program, (), 1.0)
    if found is None or found[0] <= search.problem.limit_bytes:
        return
    links = find_waiting_links(search, found[1].sequence, found[2])
    for spacing in numbers.spacings:
        if len(links) < spacing:
            continue
        share = 1.0
        for _ in range(numbers.tries):
            if search.done or search.good_enough or search.problem.seconds > stop:
                return
            found = _play(search, program, links[::spacing], share)
            if found is None:
                break
            peak, seed, _ = found
            search.repair(seed.sequence, seed.makers, f"every {spacing}. of {len(links)} links kept", seconds=numbers.repair_s)
            if peak <= search.problem.limit_bytes:
                break
            share *= min(numbers.guess * search.problem.limit_bytes / peak, numbers.least_step)


def _play(search: Search, program: CutProgram, kept: Iterable[int], share: float) -> tuple[int, Seed, CutSolution] | None:
    """Solve for a share of the budget; the order of the solution that holds least, with its peak."""
    problem = search.problem
    solution = program.solve(int(problem.limit_bytes * share), kept=kept, time_limit_s=max(problem.seconds_left, 0.1))
    if solution is None:
        return None
    seeds = seeds_from(problem.model, solution, search.rank)
    played = [(peak_and_time(problem.model.arrays, seed.sequence)[0], seed, solution) for seed in seeds]
    return min((found for found in played if found[0] != INVALID), key=lambda found: found[0], default=None)


def find_waiting_links(search: Search, sequence: Ints, solution: CutSolution) -> list[int]:
    """What has come back at the peak, has already served to bring back others, and waits to be read later; in that order."""
    model = search.problem.model
    peak = int(np.argmax(usage_of(model.arrays, sequence)))
    seen: set[int] = set()
    again: dict[int, int] = {}
    served: set[int] = set()
    for position, form in enumerate(sequence[: peak + 1]):
        served.update(s for s in model.ins[form] if s in again)
        again.update({s: position for s in model.outs[form] if s in seen})
        seen.update(model.outs[form])
    later = {s for form in sequence[peak + 1 :] for s in model.ins[form]}
    waiting = [s for s in again if s in served and s in later and solution.keep[0][s] < 0.5]
    return sorted(waiting, key=again.__getitem__)
