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

A chain of cuts, each of which can only come after the one before, repeats the middle: k of cut j + 1 comes from k of cut j
and from what runs between them. That sees a value recomputed twice, which one cut cannot; it pays off near the floor.

An in-place form uses up what it overwrites, so as many values of that are made as are overwritten or kept (a value may then be
made more than once in a stage). Rows that only raise the LP's value (`spans`) can be left out: whole solutions are the same.

With k whole (`solve_whole`) it is a 0-1 program that HiGHS closes in tenths of a second for a few cuts: its solution can be
played as it is, and where that fits the budget it is optimal (`refine.py` adds cuts until it does).

The LP's bound is not the solver's float but the Lagrangian value of its dual, which is valid whatever the solver's
tolerance. Where no k fits, the least memory of the same program is the proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack

from memfit.planning.cuts.milp import solve_mixed
from memfit.planning.cuts.reachability import find_made_by_several, find_makeable, find_runnable_without, find_takers, make_flags
from memfit.planning.model.lower_bounds import find_required, find_required_before
from memfit.planning.model.reduce import Flags, Floats, Ints, Model

Span = tuple[int, int]
"""Stages from the first to the last, both included: stage j ends with cut j."""
_SAFETY = 1e-9
"""Relative rounding that a bound is lowered by before it is turned into a whole number."""
_WHOLE_GAP = 1e-5
_WHOLE_SAFETY = 1e-5
"""A bound from a branch-and-bound tree has no short certificate: it is lowered by more than the solver's tolerances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSolution:
    """The program's values: `keep[j][s]` and `at[j][f]` at cut j, `runs[j][f]` in the stage before it (and after the last).

    `bound_ns` holds for every plan inside the budget; `time_ns` is what the values themselves take. `prices[j]` is what the budget at
    cut j costs, as a share of all of them: 0 where it could be anything (an LP's answer; a 0-1 program has none).
    """

    cuts: tuple[int, ...]
    bound_ns: int
    time_ns: int
    keep: tuple[Floats, ...]
    runs: tuple[Floats, ...]
    at: tuple[Floats, ...]
    prices: tuple[float, ...] = ()

    @property
    def total(self) -> Floats:
        """How often each form runs at all."""
        return np.asarray(np.sum((*self.runs, *self.at), axis=0))

    @property
    def again(self) -> Floats:
        """How often each form runs after the first cut: by what dropped values come back."""
        return np.asarray(np.sum(self.runs[1:], axis=0))


class CutProgram:
    """The program of one cut, or of a chain of cuts each of which must come after the one before; solved for many budgets."""

    def __init__(self, model: Model, cuts: Sequence[int], *, spans: bool = True) -> None:
        self.model, self.cuts = model, tuple(cuts)
        self.takers = find_takers(model)
        self.num_variables = 0
        able = [find_runnable_without(model, cut) for cut in cuts]
        self.runs = [self._number(flags) for flags in (*able, np.ones(model.num_forms, np.bool_))]
        self.at = [self._number(make_flags(model.producers[cut], model.num_forms)) for cut in cuts]
        self.keep = [self._number(find_makeable(model, flags)) for flags in able]
        again = make_flags([g for s in self.takers for g in model.producers[s]], model.num_forms) & model.arrays.replayable
        self.more = [self._number((numbers >= 0) & again) for numbers in self.runs]
        self.spans = {(stage, stage): numbers for stage, numbers in enumerate(self.runs)}
        chain = [(i, j) for j in range(len(self.runs)) for i in range(j)] if spans and len(self.cuts) > 1 else []
        self.spans |= {(first, last): self._number(self.runs[last] >= 0) for first, last in chain}
        self.made = {span: self._number(find_made_by_several(model, numbers >= 0)) for span, numbers in self.spans.items()}
        self.rows: list[list[tuple[int, float]]] = []
        self.right: list[float] = []
        for span in self.spans:
            self._several_rows(span)
        for stage in range(len(self.runs)):
            self._flow_rows(stage)
        for cut in range(len(self.cuts)):
            self._keep_rows(cut)
        for first, last in chain:
            self._span_rows(first, last)
        for first, last in self.spans if chain else ():
            self._made_rows(first, last)
        self._result_rows()
        self._required_rows()
        self._once_rows()
        self._taken_rows()
        self.most = self._most()
        self.time_scale = float(max(int(model.arrays.time.sum()), 1))
        self.cost = self._cost_row()
        self.memory = [self._memory_row(cut) for cut in range(len(self.cuts))]
        self._matrix()

    def _number(self, flags: Flags) -> Ints:
        numbers = np.full(len(flags), -1, np.int64)
        count = int(flags.sum())
        numbers[flags] = np.arange(self.num_variables, self.num_variables + count)
        self.num_variables += count
        return numbers

    # -- rows: every one is  Σ coefficient * x <= right -----------------------------------------------------------

    def _row(self, entries: list[tuple[int, float]], right: float) -> None:
        self.rows.append(entries)
        self.right.append(right)

    def _there(self, span: Span, storage: int) -> list[tuple[int, float]]:
        """What makes `storage` available in a span of stages: runs in it, and what the cut before it kept and made."""
        makers, together = self.model.producers[storage], int(self.made[span][storage])
        found = [together] if together >= 0 else [int(self.spans[span][g]) for g in makers]
        if span[0]:
            found += [int(self.at[span[0] - 1][g]) for g in makers] + [int(self.keep[span[0] - 1][storage])]
        taken = [int(self.at[span[0] - 1][f]) for f in self.takers.get(storage, ())] if span[0] else []
        return [(v, -1.0) for v in found if v >= 0] + [(v, 1.0) for v in taken if v >= 0]

    def _needs(self, variable: int, storages: Iterable[int], span: Span) -> None:
        """A form runs only if its inputs are available; sources are until somebody drops them."""
        for s in storages:
            if span[0] or not self.model.arrays.source[s]:
                self._row([(variable, 1.0), *self._there(span, s)], 0.0)

    def _several_rows(self, span: Span) -> None:
        """What several forms can make is made only if what all of them read is there: else half of each gets by with half of it."""
        for s in map(int, np.flatnonzero(self.made[span] >= 0)):
            makers = [g for g in self.model.producers[s] if self.spans[span][g] >= 0]
            self._row([(int(self.made[span][s]), 1.0), *((int(self.spans[span][g]), -1.0) for g in makers)], 0.0)
            self._needs(int(self.made[span][s]), sorted(set.intersection(*(set(self.model.ins[g]) for g in makers))), span)

    def _flow_rows(self, stage: int) -> None:
        for f in map(int, np.flatnonzero(self.runs[stage] >= 0)):
            self._needs(int(self.runs[stage][f]), self.model.ins[f], (stage, stage))

    def _keep_rows(self, cut: int) -> None:
        model, keep, at = self.model, self.keep[cut], self.at[cut]
        for s in map(int, np.flatnonzero(keep >= 0)):
            self._needs(int(keep[s]), (s,), (cut, cut))
            if model.arrays.pinned[s]:  # a result already made is held
                found = [int(self.runs[cut][g]) for g in model.producers[s]]
                for variable in (*found, *(v for v, x in self._there((cut, cut), s) if x < 0)):
                    if variable >= 0:
                        self._row([(variable, 1.0), (int(keep[s]), -1.0)], 0.0)
        makers = model.producers[self.cuts[cut]]
        for s in sorted(set.intersection(*(set(model.ins[f]) for f in makers))):
            if keep[s] >= 0:
                self._row([(int(keep[s]), -1.0)], -1.0)
        for f in makers:
            for s in model.ins[f]:
                if keep[s] >= 0:
                    self._row([(int(at[f]), 1.0), (int(keep[s]), -1.0)], 0.0)
        self._row([(int(at[f]), -1.0) for f in makers], -1.0)

    def _span_rows(self, first: int, last: int) -> None:
        """Whether a form runs at all in stages `first` to `last`: else half a run in each of two would get by with half its inputs.

        So a chain is never weaker than the chains it contains, for which these are the runs of one stage.
        """
        model, end, span = self.model, len(self.cuts), (first, last)
        parts = (*self.runs[first : last + 1], *self.at[first:last])
        for f in map(int, np.flatnonzero(self.spans[span] >= 0)):
            variable = int(self.spans[span][f])
            self._row([(variable, 1.0), *((int(numbers[f]), -1.0) for numbers in parts if numbers[f] >= 0)], 0.0)
            self._needs(variable, model.ins[f], span)
        if last < end:
            for s in map(int, np.flatnonzero(self.keep[last] >= 0)):
                self._needs(int(self.keep[last][s]), (s,), span)
        for s in map(int, np.flatnonzero(model.arrays.pinned)) if last == end else ():
            self._row(self._there(span, s), -1.0)

    def _made_rows(self, first: int, last: int) -> None:
        """What every plan makes by the end of a span that begins with the step, or before and in one that ends with it."""
        model, end = self.model, len(self.cuts)
        if first and last < end:
            return
        parts = [self.spans[first, last]]
        if first:
            parts += [self.spans[0, first - 1], self.at[first - 1]]
        wanted = find_required(model) if last == end else find_required_before(model, self.cuts[last])
        for s in sorted(wanted):
            self._row([(int(numbers[f]), -1.0) for f in model.producers[s] for numbers in parts if numbers[f] >= 0], -1.0)

    def _result_rows(self) -> None:
        for s in np.flatnonzero(self.model.arrays.pinned):
            self._row(self._there((len(self.cuts), len(self.cuts)), int(s)), -1.0)

    def _all_runs(self, form: int) -> list[int]:
        return [int(numbers[form]) for numbers in (*self.runs, *self.at) if numbers[form] >= 0]

    def _required_rows(self) -> None:
        """What every plan makes is made whole, not half before and half after from a half that was kept."""
        for s in sorted(find_required(self.model)):
            self._row([(v, -1.0) for f in self.model.producers[s] for v in self._all_runs(f)], -1.0)

    def _once_rows(self) -> None:
        once: dict[int, list[tuple[int, float]]] = {}
        for f, (op, _) in enumerate(self.model.forms):
            if not self.model.arrays.replayable[f]:
                once.setdefault(op, []).extend((v, 1.0) for v in self._all_runs(f))
        for row in once.values():
            self._row(row, 1.0)

    def _taken_rows(self) -> None:
        """What is overwritten in a stage or kept at its end was there at its beginning or is made in it, one value for each."""
        for storage, takers in self.takers.items():
            for stage, numbers in enumerate(self.runs):
                used = [int(numbers[f]) for f in takers if numbers[f] >= 0]
                kept = [int(self.keep[stage][storage])] if stage < len(self.cuts) else []
                makers = self.model.producers[storage]
                made = [int(x[g]) for x in (numbers, self.more[stage]) for g in makers]
                before = self._there((stage, stage), storage) if stage else []
                inside = {int(self.made[stage, stage][storage]), *made}
                row = [(v, 1.0) for v in (*used, *kept) if v >= 0] + [(v, -1.0) for v in made if v >= 0]
                if used:
                    self._row(
                        [*row, *((v, x) for v, x in before if v not in inside)], float(self.model.arrays.source[storage] and not stage)
                    )
        for more, runs in zip(self.more, self.runs, strict=True):
            for f in map(int, np.flatnonzero(more >= 0)):
                self._row([(int(more[f]), 1.0), (int(runs[f]), -self._most_more(f))], 0.0)

    def _most_more(self, form: int) -> float:
        """Runs of a form in one stage, beyond the first, that could have a use: one for each form that overwrites what it makes."""
        made = (*self.model.outs[form], *(new for new, _ in self.model.takes[form]))
        return float(max(len(self.takers.get(s, ())) for s in made))

    def _most(self) -> Floats:
        most = np.ones(self.num_variables)
        for more in self.more:
            for f in map(int, np.flatnonzero(more >= 0)):
                most[more[f]] = self._most_more(f)
        return most

    def _cost_row(self) -> Floats:
        cost = np.zeros(self.num_variables)
        time = self.model.arrays.time / self.time_scale
        for numbers in (*self.runs, *self.at, *self.more):
            cost[numbers[numbers >= 0]] = time[numbers >= 0]
        return cost

    def _memory_row(self, cut: int) -> Floats:
        memory = np.zeros(self.num_variables)
        a, keep = self.model.arrays, self.keep[cut]
        memory[keep[keep >= 0]] = a.size[keep >= 0]
        for f in np.flatnonzero(self.at[cut] >= 0):
            memory[self.at[cut][f]] = a.workspace[f] + sum(int(a.size[s]) for s in self.model.outs[f])
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

    def solve(self, limit_bytes: int, *, kept: Iterable[int] = (), time_limit_s: float = 60.0) -> CutSolution | None:
        """The cheapest way through the cuts, or None when nothing fits (`least_bytes` then proves it) or time is up.

        With storages that must be `kept` at every cut it is a seed: its bound is then none for other plans.
        """
        if limit_bytes < self.model.arrays.base_bytes:
            return None
        matrix, right = self._within(limit_bytes)
        bounds = np.stack((np.zeros(self.num_variables), self.most), axis=1)
        for numbers in self.keep:
            bounds[[int(numbers[s]) for s in kept if numbers[s] >= 0], 0] = 1.0
        found = linprog(self.cost, A_ub=matrix, b_ub=right, bounds=bounds, method="highs", options={"time_limit": max(time_limit_s, 0.05)})
        if found.x is None or found.status != 0:
            return None
        dual = np.maximum(-found.ineqlin.marginals, 0.0)
        bound = self._lagrangian(self.cost, matrix, right, dual) * self.time_scale
        memory = dual[-len(self.cuts) :]
        prices = tuple(map(float, memory / max(float(memory.sum()), 1e-300)))
        return replace(self._solution(found.x, bound - _SAFETY * self.time_scale), prices=prices)

    def solve_whole(
        self,
        limit_bytes: int,
        *,
        time_limit_s: float,
        gap: float = _WHOLE_GAP,
        low: Floats | float = 0.0,
        high: Floats | None = None,
        small_bytes: int = 0,
    ) -> CutSolution | None:
        """The same with every storage kept or not, nothing half: what comes out can be played as it is, and the bound is higher.

        Of storages under `small_bytes` a half may be kept. With variables held in narrower limits (`low`, `high`) it is a seed: its
        bound is then none for other plans.
        """
        if limit_bytes < self.model.arrays.base_bytes:
            return None
        whole = np.zeros(self.num_variables, np.bool_)
        for numbers in self.keep:
            whole[numbers[(numbers >= 0) & (self.model.arrays.size >= small_bytes)]] = True
        several = np.array([f for makers in self.model.producers if len(makers) > 1 for f in makers], np.int64)
        for numbers in (*self.runs, *self.at):  # with one producer each, whole keeps make whole runs by themselves
            whole[numbers[several][numbers[several] >= 0]] = True
        found = solve_mixed(
            self.cost,
            *self._within(limit_bytes),
            whole,
            time_limit_s=time_limit_s,
            gap=gap,
            low=low,
            high=self.most if high is None else high,
        )
        if found.x is None:
            return None
        return self._solution(found.x, found.bound * self.time_scale - _WHOLE_SAFETY * self.time_scale)

    def _within(self, limit_bytes: int) -> tuple[csr_matrix, Floats]:
        """All rows, with the budget's in units of the budget."""
        room = float(limit_bytes - self.model.arrays.base_bytes)
        scale = max(room, 1.0)
        matrix = vstack((self.flow, *(csr_matrix((row / scale).reshape(1, -1)) for row in self.memory)), format="csr")
        return matrix, np.array([*self.right, *(room / scale for _ in self.memory)])

    def _solution(self, values: Floats, bound: float) -> CutSolution:
        return CutSolution(
            cuts=self.cuts,
            bound_ns=ceil(max(bound, 0.0)),
            time_ns=round(float(self.cost @ values) * self.time_scale),
            keep=tuple(_pick(values, numbers) for numbers in self.keep),
            runs=tuple(_pick(values, numbers) for numbers in self.runs),
            at=tuple(_pick(values, numbers) for numbers in self.at),
        )

    def least_bytes(self) -> int:
        """The least memory at the first cut, whatever the time: a budget below it is proven infeasible."""
        memory = self.memory[0]
        scale = max(float(memory.max(initial=0.0)), 1.0)
        bounds = np.stack((np.zeros(self.num_variables), self.most), axis=1)
        found = linprog(memory / scale, A_ub=self.flow, b_ub=self.right, bounds=bounds, method="highs")
        if found.x is None:
            return int(self.model.arrays.base_bytes)
        bound = self._lagrangian(memory / scale, self.flow, np.array(self.right), -found.ineqlin.marginals) * scale
        return int(self.model.arrays.base_bytes) + max(ceil(bound - _SAFETY * scale), 0)

    def _lagrangian(self, cost: Floats, matrix: csr_matrix, right: Floats, dual: Floats) -> float:
        """min over x in [0, most] of cost·x + dual·(matrix x - right): below the optimum for every dual >= 0."""
        dual = np.maximum(dual, 0.0)
        reduced = cost + matrix.T @ dual
        return float(np.minimum(reduced, 0.0) @ self.most - dual @ right)


def _pick(values: Floats, numbers: Ints) -> Floats:
    return np.where(numbers >= 0, values[numbers], 0.0)
