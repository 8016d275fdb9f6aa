"""Retention intervals in CP-SAT (Bartan et al., "Moccasin", 2023): each value is held over at most C intervals.

    op i     ├── first run ───┤            ├── second run ──┤        start and end of each interval are variables
    cumulative(sizes) <= budget;  every read of u by v falls into an interval of u;  minimise the time of optional intervals

First runs keep step order; a recomputation happens just before some later op, in order among themselves. An oracle and
a baseline: optimal among such plans when the solver says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import numpy as np

from memfit.core import cp_sat
from memfit.core.outcome import Outcome, Status
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.model.reduce import Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSat:
    """`num_intervals` is C, how often a value may be made; `workers` are the solver's threads."""

    name: str = "cp_sat"
    num_intervals: int = 2
    workers: int = 2

    def plan(self, problem: Problem) -> Outcome:
        program = _Intervals(problem.model, problem.limit_bytes, self.num_intervals)
        solver = cp_sat.Solver()
        status = solver.solve(program.cp, time_limit_s=max(problem.seconds_left, 0.1), workers=self.workers)
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            return judge_sequence(problem, planner=self.name, sequence=None)
        sequence = program.sequence(solver)
        peak, _ = peak_and_time(problem.model.arrays, np.array(sequence, np.int64))
        note = f"optimal among plans in step order that make nothing more than {self.num_intervals} times"
        reason = note if status is Status.OPTIMAL and 0 <= peak <= problem.limit_bytes else ""
        return judge_sequence(problem, planner=self.name, sequence=sequence, reason=reason)


class _Intervals:
    def __init__(self, model: Model, limit: int, copies: int) -> None:
        self.model, self.cp = model, cp_sat.new_model("planner 'cp_sat'")
        a = model.arrays
        self.agenda, self.n = model.agenda, len(model.agenda)
        self.home = {s: i for i, f in enumerate(self.agenda) for s in (*model.outs[f], *(new for new, _ in model.takes[f]))}
        room = max(limit - int(a.base_bytes + a.size[a.source].sum()), 0)
        sizes = [sum(int(a.size[s]) for s in model.outs[f]) for f in self.agenda]
        work = [int(a.workspace[f]) for f in self.agenda]
        self.unit = reduce(gcd, [*sizes, *work, room], 0) or 1
        self.end = self.time_of(self.n, 0)
        self.starts: list[list[Any]] = []
        self.ends: list[list[Any]] = []
        self.present: list[list[Any]] = []
        intervals, demands = [], []
        for i, f in enumerate(self.agenda):
            self._add_copies(i, 1 if not a.replayable[f] else copies)
            held = any(a.pinned[s] for s in model.outs[f])
            for start, end, here in zip(self.starts[i], self.ends[i], self.present[i], strict=True):
                if held and start is self.starts[i][0]:
                    self.cp.add(end == self.end)
                length = self.cp.new_int_var(1, self.end + 1, "")
                intervals.append(self.cp.new_optional_interval_var(start, length, end + 1, here, ""))
                demands.append(sizes[i] // self.unit)
                if work[i]:
                    intervals.append(self.cp.new_optional_fixed_size_interval_var(start, 1, here, ""))
                    demands.append(work[i] // self.unit)
        self.cp.add_cumulative(intervals, demands, room // self.unit)
        for v, f in enumerate(self.agenda):
            for u in sorted({self.home[s] for s in model.ins[f] if s in self.home}):
                self._add_reads(u, v)
        again = [(int(a.time[f]), here) for i, f in enumerate(self.agenda) for here in self.present[i][1:]]
        self.cp.minimize(sum(time * here for time, here in again))

    def time_of(self, stage: int, i: int) -> int:
        """Stage k runs recomputations of 0 .. k-1 in order, then k: every run has its own instant."""
        return stage * (stage + 1) // 2 + i

    def _add_copies(self, i: int, copies: int) -> None:
        first = self.time_of(i, i)
        self.starts.append([self.cp.new_constant(first)])
        self.ends.append([self.cp.new_int_var(first, self.end, "")])
        self.present.append([self.cp.new_constant(1)])
        later = [self.time_of(k, i) for k in range(i + 1, self.n)]
        for _ in range(copies - 1 if later else 0):
            start = self.cp.new_int_var(later[0], later[-1], "")
            self.cp.add_allowed_assignments([start], [[x] for x in later])
            here = self.cp.new_bool_var("")
            end = self.cp.new_int_var(later[0], self.end, "")
            self.cp.add(end >= start).only_enforce_if(here)
            self.cp.add(start > self.ends[i][-1]).only_enforce_if(here)
            if len(self.present[i]) > 1:
                self.cp.add_implication(here, self.present[i][-1])
            self.starts[i].append(start)
            self.ends[i].append(end)
            self.present[i].append(here)

    def _add_reads(self, u: int, v: int) -> None:
        """Each run of v finds u in one of u's intervals."""
        for start_v, here_v in zip(self.starts[v], self.present[v], strict=True):
            served = []
            for start_u, end_u, here_u in zip(self.starts[u], self.ends[u], self.present[u], strict=True):
                serves = self.cp.new_bool_var("")
                self.cp.add_implication(serves, here_u)
                self.cp.add(start_u < start_v).only_enforce_if(serves)
                self.cp.add(start_v <= end_u).only_enforce_if(serves)
                served.append(serves)
            self.cp.add_bool_or([*served, here_v.negated()])

    def sequence(self, solver: cp_sat.Solver) -> list[int]:
        runs = []
        for i, f in enumerate(self.agenda):
            for start, here in zip(self.starts[i], self.present[i], strict=True):
                if solver.value(here):
                    runs.append((solver.value(start), f))
        return [f for _, f in sorted(runs)]
