"""The state of an anytime search: the best sequence so far, the bound, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from memfit.planning.cuts.just_in_time import default_makers
from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.model.inplace_forms import Siblings, find_siblings, overwritten
from memfit.planning.model.lower_bounds import Floor, find_floor
from memfit.planning.model.reduce import Ints
from memfit.planning.problem import Problem
from memfit.planning.search.drop_repeats import polish
from memfit.planning.search.repair import Repairer

_NEARLY_POINTS = 0.005
_REMEMBERED = 8


@dataclass(slots=True)
class Search:
    """Mutable on purpose: one search, many steps. `enough_points` is the gap, in points of the plain step, worth stopping at."""

    problem: Problem
    enough_points: float = 0.3
    max_runs: int | None = None  # how often one form may run; None: as often as it pays
    best: Ints | None = None
    best_time_ns: int = 0
    pool: list[tuple[int, Ints, Ints]] = field(default_factory=list)  # the fastest that fit: time, sequence, makers
    closest: Ints | None = None  # least peak seen, while nothing fits
    miss: Ints | None = None  # the closest, when the first plan that fits was found
    closest_peak_bytes: int = 2**62
    rank: Ints | None = None  # where each form stands in an order that holds less than the step's own
    bound_ns: int = 0
    proof: str = ""
    makers: Ints = field(init=False)  # the forms by which the best sequence remakes things
    floor: Floor = field(init=False)
    siblings: Siblings = field(init=False)

    def __post_init__(self) -> None:
        self.floor = find_floor(self.problem.model)
        self.siblings = find_siblings(self.problem.model)
        self.makers = default_makers(self.problem.model)
        self.bound_ns = self.floor.time_ns
        if self.problem.limit_bytes < self.floor.bytes:
            self.proof = self.floor.sentence(self.problem.limit_bytes)

    @property
    def settled(self) -> bool:
        return bool(self.proof) or self.optimal

    @property
    def done(self) -> bool:
        return self.settled or self.problem.seconds_left <= 0

    @property
    def optimal(self) -> bool:
        return self.best is not None and self.best_time_ns <= self.bound_ns

    @property
    def good_enough(self) -> bool:
        """The gap is small: at once if it is tiny, after a tenth of the time if it is only small."""
        patient = self.problem.seconds < 0.1 * self.problem.time_limit_s
        return self.best is not None and self.gap_points <= (min(0.05, self.enough_points) if patient else self.enough_points)

    @property
    def nearly_closed(self) -> bool:
        """Bound and plan have met for all that matters."""
        return self.best is not None and self.gap_points <= _NEARLY_POINTS

    @property
    def gap_points(self) -> float:
        return 100.0 * (self.best_time_ns - self.bound_ns) / max(self.problem.model.base_time_ns, 1)

    def raise_bound(self, bound_ns: int) -> None:
        self.bound_ns = max(self.bound_ns, bound_ns)

    def offer(self, sequence: Ints, note: str = "", makers: Ints | None = None) -> bool:
        """Take a sequence if it fits and is faster than the best; remember the lowest peak otherwise."""
        sequence = overwritten(self.problem.model.arrays, sequence, self.siblings)
        peak, time = peak_and_time(self.problem.model.arrays, sequence)
        if peak == INVALID or (self.max_runs is not None and len(sequence) and np.bincount(sequence).max() > self.max_runs):
            return False
        if self.best is None and peak <= self.problem.limit_bytes:
            self.miss = self.closest
        if peak < self.closest_peak_bytes:
            self.closest, self.closest_peak_bytes = sequence, peak
        if peak <= self.problem.limit_bytes:
            self._remember(time, sequence, self.makers if makers is None else makers)
        if peak > self.problem.limit_bytes or (self.best is not None and time >= self.best_time_ns):
            return False
        self.best, self.best_time_ns = sequence, time
        if makers is not None:
            self.makers = makers
        self.problem.tell(time, self.bound_ns, note)
        return True

    def _remember(self, time: int, sequence: Ints, makers: Ints) -> None:
        if all(time != known for known, _, _ in self.pool):
            self.pool.append((time, sequence, makers))
            self.pool.sort(key=lambda item: item[0])
            del self.pool[_REMEMBERED:]

    def mend(self, sequence: Ints, makers: Ints, note: str, *, top: int = 24, wide: int = 96, seconds: float = 20.0) -> bool:
        """Repair in two ways, polish, offer; each of them for at most `seconds`."""
        a, limit = self.problem.model.arrays, self.problem.limit_bytes
        if self.best is not None or len(a.time) < 3000:  # another seed is likely better than this one mended at length
            seconds = min(seconds, max(0.08 * self.problem.time_limit_s, 0.5))
        seconds = min(seconds, max(0.5 * self.problem.seconds_left, 1.0))
        if len(a.time) >= 3000:  # looking around costs time in the length of the sequence: look at less, take more steps
            top, wide = min(top, 6), min(wide, 10)
        makers = np.where(makers >= 0, self.siblings.plain[makers], makers)
        inplace = self.siblings.known
        steps = 400 if len(a.time) < 3000 else 4000
        plain, better = self.siblings.plain[np.asarray(sequence)], False
        for bold in (False, True) if len(a.time) < 3000 else (False,):
            fixer = Repairer(arrays=a, limit=limit, maker=makers, top=top, wide=wide, inplace=inplace, bold=bold)
            fixed = fixer.run(plain, steps, perf_counter() + seconds)
            untouched = np.array_equal(fixed, plain)
            peak, _ = peak_and_time(a, overwritten(a, fixed, self.siblings))
            if peak != INVALID and peak <= limit:
                fixed = polish(a, fixed, limit, 6, perf_counter() + seconds, inplace=inplace)
            better |= self.offer(fixed, note, makers)
            if untouched:
                break
        return better
