"""The state of an anytime search: the best sequence so far, the bound, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from memfit.planning.cuts.just_in_time import default_makers
from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.model.inplace_forms import Siblings, find_siblings, use_inplace
from memfit.planning.model.lower_bounds import Floor, find_floor
from memfit.planning.model.reduce import Ints
from memfit.planning.problem import Planner, Problem
from memfit.planning.search.drop_repeats import polish
from memfit.planning.search.repair import Repairer
from memfit.planning.settings import AutoSettings

if TYPE_CHECKING:
    from memfit.planning.cuts.refine import CutChain


@dataclass(slots=True)
class Search:
    """What stages know and leave to each other. `enough_points` is the gap, in points of the plain step, worth stopping at."""

    problem: Problem
    settings: AutoSettings = field(default_factory=AutoSettings)
    enough_points: float = 0.3
    seed: int = 0
    patience: float | None = None  # share of the time without a gain after which a walk ends
    max_runs: int | None = None  # how often one form may run; None: as often as it pays
    may_reorder: bool = True
    planner: Planner | None = None  # plans other steps as this one is planned
    best: Ints | None = None
    best_time_ns: int = 0
    pool: list[tuple[int, Ints, Ints]] = field(default_factory=list)  # the fastest that fit: time, sequence, makers
    closest: Ints | None = None  # least peak seen, while nothing fits
    miss: Ints | None = None  # the closest, when the first plan that fits was found
    closest_peak_bytes: int = 2**62
    rank: Ints | None = None  # where each form stands in an order that holds less than the step's own
    chain: CutChain | None = None  # the cuts that were solved exactly
    has_wide_chain: bool = False  # cuts at wide ops were tried
    began_without_variants: bool = False  # most of the time went into the step without its variants
    found_way_back: bool = False  # the first plan is one read backwards from the only result
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
        """The gap is small: at once if it is tiny, after a part of the time if it is only small."""
        stop = self.settings.stop
        early = self.problem.seconds < stop.early_share * self.problem.time_limit_s
        return self.best is not None and self.gap_points <= (min(stop.early_points, self.enough_points) if early else self.enough_points)

    @property
    def nearly_closed(self) -> bool:
        """Bound and plan have met for all that matters."""
        return self.best is not None and self.gap_points <= self.settings.stop.closed_points

    @property
    def gap_points(self) -> float:
        return 100.0 * (self.best_time_ns - self.bound_ns) / max(self.problem.model.base_time_ns, 1)

    @property
    def is_large(self) -> bool:
        """Whether steps that grow faster than the graph are left out."""
        return self.problem.model.num_forms >= self.settings.large_forms

    @property
    def is_hurried(self) -> bool:
        """Whether cuts at wide ops take the place of exact chains, for lack of time."""
        return self.has_wide_chain and self.problem.time_limit_s < self.settings.wide.ample_s

    def raise_bound(self, bound_ns: int) -> None:
        self.bound_ns = max(self.bound_ns, bound_ns)

    def consider(self, sequence: Ints, note: str = "", makers: Ints | None = None) -> bool:
        """Take a sequence if it fits and is faster than the best; remember the lowest peak otherwise."""
        sequence = use_inplace(self.problem.model.arrays, sequence, self.siblings)
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
            del self.pool[self.settings.stop.num_remembered :]

    def repair(self, sequence: Ints, makers: Ints, note: str, *, seconds: float | None = None) -> bool:
        """Repair in two ways, drop repeats, consider the result; each of them for at most `seconds`."""
        a, limit, problem, numbers = self.problem.model.arrays, self.problem.limit_bytes, self.problem, self.settings.repair
        seconds = (numbers.seconds_large if self.is_large else numbers.seconds) if seconds is None else seconds
        if self.best is not None or not self.is_large:
            seconds = min(seconds, max(numbers.share * problem.time_limit_s, 0.5))
        seconds = min(seconds, max(numbers.share_left * problem.seconds_left, 1.0))
        top, wide = (numbers.judged_large, numbers.looked_at_large) if self.is_large else (numbers.judged, numbers.looked_at)
        steps = numbers.steps_large if self.is_large else numbers.steps
        makers = np.where(makers >= 0, self.siblings.plain[makers], makers)
        inplace = self.siblings.known
        plain, better = self.siblings.plain[np.asarray(sequence)], False
        for bold in (False,) if self.is_large else (False, True):
            fixer = Repairer(arrays=a, limit=limit, maker=makers, top=top, wide=wide, inplace=inplace, bold=bold)
            fixed = fixer.run(plain, steps, perf_counter() + seconds)
            untouched = np.array_equal(fixed, plain)
            peak, _ = peak_and_time(a, use_inplace(a, fixed, self.siblings))
            if peak != INVALID and peak <= limit:
                fixed = polish(a, fixed, limit, numbers.polish_rounds, perf_counter() + seconds, inplace=inplace)
            better |= self.consider(fixed, note, makers)
            if untouched:
                break
        return better
