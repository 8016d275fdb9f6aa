"""Checkpoint segments (Chen, Xu, Zhang, Guestrin 2016): cut the forward part into k segments, keep what crosses a border.

    forward   [a b c | d e f | g h i]  turn  backward: each segment is recomputed from its border when it is needed

k = √n balances borders against the segment being recomputed; here all sensible k are tried, cut evenly by ops and by
bytes, and the fastest that stays inside the budget wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np

from memfit.core.outcome import Outcome
from memfit.planning.cuts.just_in_time import keep_at, turning_point
from memfit.planning.model.fast_judge import peak_and_time, usage_of
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SqrtSegments:
    """`num_segments` fixes k; None searches for the best."""

    name: str = "sqrt_segments"
    num_segments: int | None = None

    def plan(self, problem: Problem) -> Outcome:
        return judge_sequence(problem, planner=self.name, sequence=self.sequence(problem))

    def sequence(self, problem: Problem) -> Ints | None:
        """The best of the segmentations tried: the fastest that fits, or the one least over the budget."""
        model = problem.model
        agenda = np.array(model.agenda, np.int64)
        turn = turning_point(model, usage_of(model.arrays, agenda))
        best: tuple[tuple[int, int, int], Ints] | None = None
        for weights in (np.ones(turn + 1), bytes_made(model, turn)):
            for k in self._counts(turn + 1):
                sequence = segments_sequence(model, turn, weights, k)
                peak, time = peak_and_time(model.arrays, sequence)
                over = max(peak - problem.limit_bytes, 0)
                if best is None or (over, time, peak) < best[0]:
                    best = ((over, time, peak), sequence)
        return None if best is None else best[1]

    def _counts(self, num_ops: int) -> list[int]:
        if self.num_segments is not None:
            return [self.num_segments]
        root = isqrt(max(num_ops, 1))
        return sorted({1, *range(2, min(2 * root, 48) + 1), root, 2 * root, 3 * root, 4 * root})


def bytes_made(model: Model, turn: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0 + sum(float(model.arrays.size[s]) for s in model.outs[f]) for f in model.agenda[: turn + 1]])


def segments_sequence(model: Model, turn: int, weights: np.ndarray[tuple[int], np.dtype[np.float64]], num_segments: int) -> Ints:
    """Keep at the turn what is read in another segment than its own, and all of the last segment."""
    share = np.cumsum(weights) - weights
    segment = np.minimum((share * num_segments / max(float(weights.sum()), 1.0)).astype(np.int64), num_segments - 1)
    made_in: dict[int, int] = {}
    keep: set[int] = set()
    for i, f in enumerate(model.agenda[: turn + 1]):
        keep.update(s for s in model.ins[f] if made_in.get(s, segment[i]) != segment[i])
        for s in model.outs[f]:
            made_in[s] = int(segment[i])
    keep.update(s for s, home in made_in.items() if home == num_segments - 1)
    return keep_at(model, [turn], [keep])
