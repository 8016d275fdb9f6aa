"""Drop what is cheap to make again, keep convolutions and matrix products (Chen et al. 2016, "drop the results of low
cost operations"; the rule PyTorch users write by hand as a selective checkpoint policy).

Values are dropped at the turn in the order of recompute time per byte saved, until the plan fits. Results of dense ops
are the last to go. The number dropped is found by bisection, then by looking around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.outcome import Outcome
from memfit.planning.cuts.just_in_time import keep_at, turning_point
from memfit.planning.model.fast_judge import peak_and_time, usage_of
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem

DENSE = ("conv", "mm", "linear", "attention", "einsum", "dot", "lstm", "gru")
"""An op whose name holds one of these is dear: its result is dropped last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCheap:
    name: str = "drop_cheap"
    dense: tuple[str, ...] = DENSE

    def plan(self, problem: Problem) -> Outcome:
        return judge_sequence(problem, planner=self.name, sequence=self.sequence(problem))

    def sequence(self, problem: Problem) -> Ints | None:
        """The fastest that fits, or the one least over the budget."""
        model = problem.model
        turn = turning_point(model, usage_of(model.arrays, np.array(model.agenda, np.int64)))
        ranked = self._rank(model, turn)
        best: tuple[tuple[int, int, int], Ints] | None = None
        for count in _search(len(ranked)):
            sequence = keep_at(model, [turn], [ranked[count:]])
            peak, time = peak_and_time(model.arrays, sequence)
            key = (max(peak - problem.limit_bytes, 0), time, peak)
            if best is None or key < best[0]:
                best = (key, sequence)
        return None if best is None else best[1]

    def _rank(self, model: Model, turn: int) -> list[int]:
        """Storages made before the turn, cheapest to drop first."""
        a = model.arrays
        ranked = []
        for f in model.agenda[: turn + 1]:
            dense = any(word in model.name(f).lower() for word in self.dense)
            ranked += [(dense, int(a.time[f]) / max(int(a.size[s]), 1), s) for s in model.outs[f]]
        return [s for _, _, s in sorted(ranked)]


def _search(count: int) -> list[int]:
    """Up to 65 evenly spread numbers of values to drop: the peak is not monotone in it, so bisection alone would miss."""
    return sorted({round(i * count / 64) for i in range(65)})
