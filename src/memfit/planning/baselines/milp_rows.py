"""Rows of a mixed 0-1 program for scipy's HiGHS: the baselines are written as they are on paper, variable by variable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_matrix

from memfit.planning.cuts.milp import solve_mixed
from memfit.planning.model.reduce import Floats

Term = tuple[int, float]


@dataclass(slots=True)
class Program:
    """All variables are in [0, 1]; every row is Σ coefficient · x <= right."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    rows: list[list[Term]] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, low: float = 0.0, high: float = 1.0) -> int:
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        return len(self.cost) - 1

    def at_most(self, terms: Iterable[Term], right: float = 0.0) -> None:
        self.rows.append(list(terms))
        self.right.append(right)

    def solve(self, *, whole: bool, time_limit_s: float) -> tuple[Floats | None, bool]:
        """The values, and whether they are proven optimal. `whole=False` is the LP relaxation."""
        if not self.cost:
            return np.zeros(0), True
        counts = [len(row) for row in self.rows]
        matrix = csr_matrix(
            (
                np.array([x for row in self.rows for _, x in row]),
                np.array([v for row in self.rows for v, _ in row], np.int64),
                np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
            ),
            shape=(len(self.rows), len(self.cost)),
        )
        matrix.sum_duplicates()  # the solver refuses a variable that appears twice in a row
        found = solve_mixed(
            np.array(self.cost),
            matrix,
            np.array(self.right),
            np.full(len(self.cost), whole),
            time_limit_s=time_limit_s,
            gap=1e-6,
            low=np.array(self.low),
            high=np.array(self.high),
        )
        return found.x, found.proven
