"""The cut LP: one small linear program per cut gives a bound for every plan, a proof when there is none, and a seed.

Look at the moment a storage c is made for the first time. Forms split in two: those that can run without c (before or
after that moment) and those that cannot (only after).

        before              │ c is made │            after
    b_f: form f runs        │ k_s: s is │   r_f: form f runs (again)
                            │ resident  │
    b_f <= Σ b(makers of y)     y_f: by which form       r_f <= k_y + Σ r(makers of y) + what c's form makes
    k_s <= Σ b(makers of s)     k_s >= y_f for its inputs    every result: k + Σ r >= 1
                  Σ size_s k_s + Σ y_f (outputs + workspace) <= budget
                        minimise Σ time_f (b_f + y_f + r_f)

No time index, so about three variables per op, solved in hundredths of a second. It relaxes every legal schedule, in any
order and with any number of recomputations, so its value bounds them all; with operator variants and fused ops (several
producers) nothing changes. A recomputation is a b and an r of the same op.

The bound reported is not the solver's float but the Lagrangian value of its dual, which is valid whatever the solver's
tolerance. Where no k fits, the least memory of the same program is the proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from memfit.planning.floor import required_storages
from memfit.planning.model import Flags, Floats, Ints, Model

_SAFETY = 1e-9
"""Relative rounding that a bound is lowered by before it is turned into a whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSolution:
    """`keep[s]`, `before[f]`, `at[f]` and `after[f]` are the LP's values; `bound_ns` holds for every plan inside the budget."""

    cut: int
    bound_ns: int
    keep: Floats
    before: Floats
    at: Floats
    after: Floats


def runnable_without(model: Model, cut: int) -> Flags:
    """The forms that can run before storage `cut` has ever been made."""
    have = model.arrays.source.copy()
    able = np.zeros(model.num_forms, np.bool_)
    makers = set(model.producers[cut])
    changed = True
    while changed:  # one pass when ops are in order; more only for alternative producers that come later
        changed = False
        for f in range(model.num_forms):
            if not able[f] and f not in makers and all(have[s] for s in model.ins[f]):
                able[f] = changed = True
                for s in model.outs[f]:
                    have[s] = True
                for s, _ in model.takes[f]:
                    have[s] = True
    return able


class CutProgram:
    """The program of one cut, built once and solved for many budgets."""

    def __init__(self, model: Model, cut: int) -> None:
        self.model, self.cut = model, cut
        able = runnable_without(model, cut)
        forms, storages = model.num_forms, model.num_storages
        self.before = _numbering(able, 0)
        num = int(able.sum())
        at = np.zeros(forms, np.bool_)
        at[list(model.producers[cut])] = True
        self.at = _numbering(at, num)
        num += int(at.sum())
        self.after = np.arange(num, num + forms)
        num += forms
        have = model.arrays.source.copy()
        for f in np.flatnonzero(able):
            have[[*model.outs[f], *(new for new, _ in model.takes[f])]] = True
        self.keep = _numbering(have, num)
        self.num_variables = num + int(have.sum())
        self.num_storages = storages
        self.rows: list[list[tuple[int, float]]] = []
        self.right: list[float] = []
        self._flow_rows(able)
        self._result_rows()
        self._required_rows()
        self._once_rows(able)
        self.time_scale = float(max(int(model.arrays.time.sum()), 1))
        self.cost = self._cost_row()
        self.memory = self._memory_row()
        self._matrix()

    # -- rows: every one is  Σ coefficient * x <= right -----------------------------------------------------------

    def _row(self, entries: list[tuple[int, float]], right: float) -> None:
        self.rows.append(entries)
        self.right.append(right)

    def _flow_rows(self, able: Flags) -> None:
        model, source = self.model, self.model.arrays.source
        for s in range(self.num_storages):
            makers = model.producers[s]
            if self.keep[s] >= 0 and not source[s]:
                early = [(int(self.before[g]), -1.0) for g in makers if self.before[g] >= 0]
                self._row([(int(self.keep[s]), 1.0), *early], 0.0)
                if model.arrays.pinned[s]:  # a result already made is held
                    for variable, _ in early:
                        self._row([(variable, 1.0), (int(self.keep[s]), -1.0)], 0.0)
        for f in range(model.num_forms):
            for s in model.ins[f]:
                if able[f] and not source[s]:
                    early = [(int(self.before[g]), -1.0) for g in model.producers[s] if self.before[g] >= 0]
                    self._row([(int(self.before[f]), 1.0), *early], 0.0)
                if self.at[f] >= 0 and self.keep[s] >= 0:
                    self._row([(int(self.at[f]), 1.0), (int(self.keep[s]), -1.0)], 0.0)
                self._row([(int(self.after[f]), 1.0), *self._available_after(s)], 0.0)
        self._row([(int(v), -1.0) for v in self.at if v >= 0], -1.0)

    def _available_after(self, storage: int) -> list[tuple[int, float]]:
        makers = self.model.producers[storage]
        found = [(int(self.after[g]), -1.0) for g in makers]
        found += [(int(self.at[g]), -1.0) for g in makers if self.at[g] >= 0]
        if self.keep[storage] >= 0:
            found.append((int(self.keep[storage]), -1.0))
        return found

    def _result_rows(self) -> None:
        for s in np.flatnonzero(self.model.arrays.pinned):
            self._row(self._available_after(int(s)), -1.0)

    def _required_rows(self) -> None:
        """What every plan makes is made whole, not half before and half after from a half that was kept."""
        for s in sorted(required_storages(self.model)):
            runs = [v for f in self.model.producers[s] for v in (self.before[f], self.at[f], self.after[f]) if v >= 0]
            self._row([(int(v), -1.0) for v in runs], -1.0)

    def _once_rows(self, able: Flags) -> None:
        runs: dict[int, list[tuple[int, float]]] = {}
        for f, (op, _) in enumerate(self.model.forms):
            if not self.model.arrays.replayable[f]:
                row = runs.setdefault(op, [])
                row += [(int(v), 1.0) for v in (self.before[f], self.at[f], self.after[f]) if v >= 0]
        for row in runs.values():
            self._row(row, 1.0)

    def _cost_row(self) -> Floats:
        cost = np.zeros(self.num_variables)
        time = self.model.arrays.time / self.time_scale
        for numbers in (self.before, self.at, self.after):
            cost[numbers[numbers >= 0]] = time[numbers >= 0]
        return cost

    def _memory_row(self) -> Floats:
        memory = np.zeros(self.num_variables)
        a = self.model.arrays
        kept = self.keep >= 0
        memory[self.keep[kept]] = a.size[kept]
        for f in np.flatnonzero(self.at >= 0):
            memory[self.at[f]] = a.workspace[f] + sum(int(a.size[s]) for s in self.model.outs[f])
        return memory

    def _matrix(self) -> None:
        counts = [len(row) for row in self.rows]
        ptr = np.zeros(len(self.rows) + 1, np.int64)
        np.cumsum(counts, out=ptr[1:])
        columns = np.array([v for row in self.rows for v, _ in row], np.int64)
        values = np.array([x for row in self.rows for _, x in row])
        self.flow = csr_matrix((values, columns, ptr), shape=(len(self.rows), self.num_variables))
        self.flow.sum_duplicates()

    # -- solving --------------------------------------------------------------------------------------------------

    def solve(self, limit_bytes: int, *, time_limit_s: float = 60.0) -> CutSolution | None:
        """The cheapest way through this cut, or None when nothing fits (`least_bytes` then proves it)."""
        room = float(limit_bytes - self.model.arrays.base_bytes)
        if room < 0:
            return None
        scale = max(room, 1.0)
        matrix, right = self._with_memory(room / scale, scale)
        found = linprog(self.cost, A_ub=matrix, b_ub=right, bounds=(0, 1), method="highs", options={"time_limit": time_limit_s})
        if found.x is None:
            return None
        bound = self._lagrangian(self.cost, matrix, right, -found.ineqlin.marginals) * self.time_scale
        return CutSolution(
            cut=self.cut,
            bound_ns=max(ceil(bound - _SAFETY * self.time_scale), 0),
            keep=_pick(found.x, self.keep),
            before=_pick(found.x, self.before),
            at=_pick(found.x, self.at),
            after=_pick(found.x, self.after),
        )

    def least_bytes(self) -> int:
        """The least memory at this cut, whatever the time: a budget below it is proven infeasible."""
        scale = max(float(self.memory.max(initial=0.0)), 1.0)
        found = linprog(self.memory / scale, A_ub=self.flow, b_ub=self.right, bounds=(0, 1), method="highs")
        if found.x is None:
            return int(self.model.arrays.base_bytes)
        bound = self._lagrangian(self.memory / scale, self.flow, np.array(self.right), -found.ineqlin.marginals) * scale
        return int(self.model.arrays.base_bytes) + max(ceil(bound - _SAFETY * scale), 0)

    def _with_memory(self, right: float, scale: float) -> tuple[csr_matrix, Floats]:
        row = csr_matrix((self.memory / scale).reshape(1, -1))
        flow = self.flow
        data = np.concatenate((flow.data, row.data))
        columns = np.concatenate((flow.indices, row.indices))
        ptr = np.concatenate((flow.indptr, [flow.indptr[-1] + row.nnz]))
        return csr_matrix((data, columns, ptr), shape=(flow.shape[0] + 1, flow.shape[1])), np.array([*self.right, right])

    @staticmethod
    def _lagrangian(cost: Floats, matrix: csr_matrix, right: Floats, dual: Floats) -> float:
        """min over x in [0,1]^n of cost·x + dual·(matrix x - right): below the optimum for every dual >= 0."""
        dual = np.maximum(dual, 0.0)
        reduced = cost + matrix.T @ dual
        return float(np.minimum(reduced, 0.0).sum() - dual @ right)


def _pick(values: Floats, numbers: Ints) -> Floats:
    return np.where(numbers >= 0, values[numbers], 0.0)


def _numbering(flags: Flags, start: int) -> Ints:
    numbers = np.full(len(flags), -1, np.int64)
    numbers[flags] = np.arange(start, start + int(flags.sum()))
    return numbers
