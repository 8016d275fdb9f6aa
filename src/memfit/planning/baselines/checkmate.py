"""Checkmate (Jain et al., MLSys 2020): optimal rematerialization as a mixed 0-1 program, and its LP rounding.

n ops in step order; stage t makes op t for the first time, after recomputing what it likes in order.

    R[t,i]  op i runs in stage t          S[t,i]  its outputs are held when stage t starts       F[t,i,k]  freed after op k
    R[t,v] <= R[t,u] + S[t,u]             S[t+1,i] <= S[t,i] + R[t,i]
    U[t,k+1] = U[t,k] + size·R[t,k+1] - Σ size·F[t,·,k]  <=  budget

n² binaries and n·edges frees: an oracle for graphs of up to some sixty ops. It is optimal among plans that first run
ops in step order; the outputs of an op live and die together. No operator variants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.outcome import Outcome
from memfit.planning.baselines.milp_rows import Program, Term
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.model.reduce import Floats, Ints, Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem

_MAX_OPS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkmate:
    """The 0-1 program."""

    name: str = "checkmate"

    def plan(self, problem: Problem) -> Outcome:
        staged = _Staged(problem.model, problem.limit_bytes)
        values, optimal = staged.program.solve(whole=True, time_limit_s=problem.seconds_left)
        sequence = None if values is None else staged.sequence(values)
        note = "optimal among plans in step order" if optimal else "the solver ran out of time"
        return judge_sequence(problem, planner=self.name, sequence=sequence, reason=note if sequence is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckmateRounding:
    """The relaxation at a little less than the budget, round_values: S by a threshold, R by one sweep per stage."""

    name: str = "checkmate_rounding"
    shares: tuple[float, ...] = (0.9, 1.0, 0.8)
    thresholds: tuple[float, ...] = (0.5, 0.3, 0.7, 0.1, 0.9)

    def plan(self, problem: Problem) -> Outcome:
        best: tuple[int, Ints] | None = None
        for share in self.shares:
            staged = _Staged(problem.model, int(problem.limit_bytes * share))
            values, _ = staged.program.solve(whole=False, time_limit_s=problem.seconds_left / len(self.shares))
            for threshold in self.thresholds if values is not None else ():
                assert values is not None
                sequence = staged.round_values(values, threshold)
                peak, time = peak_and_time(problem.model.arrays, sequence)
                if 0 <= peak <= problem.limit_bytes and (best is None or time < best[0]):
                    best = (time, sequence)
        return judge_sequence(problem, planner=self.name, sequence=None if best is None else best[1])


class _Staged:
    def __init__(self, model: Model, limit: int) -> None:
        if len(model.agenda) > _MAX_OPS:
            raise BadInput(f"Checkmate's program has n² variables and {len(model.agenda)} ops are too many for it: use planner='auto'.")
        self.model, self.program = model, Program()
        a = model.arrays
        self.n = len(model.agenda)
        home = {s: i for i, f in enumerate(model.agenda) for s in (*model.outs[f], *(new for new, _ in model.takes[f]))}
        self.inputs = [sorted({home[s] for s in model.ins[f] if s in home}) for f in model.agenda]
        self.readers: list[list[int]] = [[] for _ in range(self.n)]
        for v, ins in enumerate(self.inputs):
            for u in ins:
                self.readers[u].append(v)
        self.unit = float(max(limit, 1))
        fixed = int(a.base_bytes + a.size[a.source].sum())
        self.room = (limit - fixed) / self.unit
        self.size = [sum(int(a.size[s]) for s in model.outs[f]) / self.unit for f in model.agenda]
        self.extra = [int(a.workspace[f]) / self.unit for f in model.agenda]
        total = max(float(sum(a.time[f] for f in model.agenda)), 1.0)
        self.time = [float(a.time[f]) / total for f in model.agenda]
        self.pinned = [any(a.pinned[s] for s in model.outs[f]) for f in model.agenda]
        self.once = [not a.replayable[f] for f in model.agenda]
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self._variables()
        for t in range(self.n):
            self._flow(t)
            self._memory(t)

    def _variables(self) -> None:
        for t in range(self.n):
            for i in range(t + 1):
                never = 0.0 if self.once[i] and i < t else 1.0
                self.R[t, i] = self.program.variable(self.time[i], low=float(i == t), high=never)
            for i in range(t):
                self.S[t, i] = self.program.variable(low=float(self.pinned[i]))

    def _flow(self, t: int) -> None:
        for v in range(t + 1):
            for u in self.inputs[v]:
                held = [(self.S[t, u], -1.0)] if (t, u) in self.S else []
                self.program.at_most([(self.R[t, v], 1.0), (self.R[t, u], -1.0), *held])
        for i in range(t + 1):
            if (t + 1, i) in self.S:
                before = [(self.S[t, i], -1.0)] if (t, i) in self.S else []
                self.program.at_most([(self.S[t + 1, i], 1.0), (self.R[t, i], -1.0), *before])

    def _memory(self, t: int) -> None:
        """U[t, k] is never a variable: it is the running sum of what came and what was freed."""
        held: list[Term] = [(self.S[t, i], self.size[i]) for i in range(t)]
        for k in range(t + 1):
            held.append((self.R[t, k], self.size[k]))
            self.program.at_most([*held, (self.R[t, k], self.extra[k])], self.room)
            leaving = [i for i in (*self.inputs[k], k) if self.size[i] and not self.pinned[i]]
            held.extend((self._add_free(t, i, k), -self.size[i]) for i in leaving)

    def _add_free(self, t: int, i: int, k: int) -> int:
        """F[t,i,k]: after op k ran in stage t, op i's outputs go; only if held, not read later in the stage and not kept."""
        free = self.program.variable()
        later = [(self.R[t, j], 1.0) for j in self.readers[i] if k < j <= t]
        kept = [(self.S[t + 1, i], 1.0)] if (t + 1, i) in self.S else []
        self.program.at_most([(free, 1.0), (self.R[t, k], -1.0)])
        for term in (*later, *kept):
            self.program.at_most([(free, 1.0), term], 1.0)
        return free

    def sequence(self, values: Floats) -> Ints:
        ran = [self.model.agenda[i] for t in range(self.n) for i in range(t + 1) if values[self.R[t, i]] > 0.5]
        return np.array(ran, np.int64)

    def round_values(self, values: Floats, threshold: float) -> Ints:
        """S by the threshold, then in each stage exactly the runs that its op and the next stage's S need."""
        held = {key for key, v in self.S.items() if values[v] > threshold or self.pinned[key[1]] or self.once[key[1]]}
        ran: list[int] = []
        for t in range(self.n):
            needed = {t} | {i for i in range(t) if (t + 1, i) in held and (t, i) not in held}
            for v in range(t, -1, -1):
                if v in needed:
                    needed.update(u for u in self.inputs[v] if (t, u) not in held)
            ran.extend(self.model.agenda[i] for i in sorted(needed))
        return np.array(ran, np.int64)
