"""MONeT (Shah et al., ICLR 2021): schedule and operator implementations chosen together by one 0-1 program.

Stage 0 is the forward pass; each later stage runs one backward op, after recomputing forward values in order.

    S[t,s]  value s is stored when stage t starts       R[t,f]  form f runs in stage t (any implementation, any variant)
    S[t+1,s] <= S[t,s] + Σ R[t, makers of s]            R[t,f] <= S[t,y] + Σ R[t, makers of y]      per stage: Σ R[t, forms of k_t] = 1
    L[t,s,j]  s is read by its j-th or a later reader in stage t, or stored after it: >= R[t, that reader], >= S[t+1,s]
    while f runs: values made earlier than f count L from f on, those made later still S[t]; plus f's outputs and workspace <= budget

Every op's form is a choice in every stage, so what a backward op needs (its mask, its output, its statistics) is chosen
with what is kept. Values of the backward pass live from their stage to their last reader's. One binary per form and
stage: an oracle and a baseline for up to some hundred ops.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.outcome import Outcome
from memfit.planning.baselines.milp_rows import Program, Term
from memfit.planning.cuts.just_in_time import turning_point
from memfit.planning.model.fast_judge import usage_of
from memfit.planning.model.reduce import Floats, Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem

_MAX_CELLS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Monet:
    name: str = "monet"

    def plan(self, problem: Problem) -> Outcome:
        staged = _Stages(problem.model, problem.limit_bytes)
        values, optimal = staged.program.solve(whole=True, time_limit_s=problem.seconds_left)
        sequence = None if values is None else staged.sequence(values)
        note = "optimal among MONeT's schedules" if optimal else "the solver ran out of time"
        return judge_sequence(problem, planner=self.name, sequence=sequence, reason=note if sequence is not None else "")


class _Stages:
    def __init__(self, model: Model, limit: int) -> None:
        self.model, self.program = model, Program()
        a = model.arrays
        agenda = list(model.agenda)
        turn = turning_point(model, usage_of(a, np.array(agenda, np.int64)))
        ops = [model.forms[f][0] for f in agenda]
        self.forms_of: dict[int, list[int]] = {}
        for f, (op, _) in enumerate(model.forms):
            if not model.takes[f]:
                self.forms_of.setdefault(op, []).append(f)
        self.forward = ops[: turn + 1] or []
        self.backward = ops[turn + 1 :]
        self.num_stages = 1 + len(self.backward)
        forward_forms = [f for op in self.forward for f in self.forms_of.get(op, [])]
        if self.num_stages * max(len(forward_forms), 1) > _MAX_CELLS:
            raise BadInput(f"MONeT's program would have {self.num_stages * len(forward_forms)} cells, too many for it: use planner='auto'.")
        self.unit = float(max(limit, 1))
        self.room = (limit - int(a.base_bytes + a.size[a.source].sum())) / self.unit
        self.total = max(float(a.time.sum()), 1.0)
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.L: dict[tuple[int, int, int], int] = {}
        self.values = sorted({s for op in ops for f in self.forms_of.get(op, []) for s in model.outs[f]})
        self.in_stage = [
            forward_forms if t == 0 else [*forward_forms, *self.forms_of.get(self.backward[t - 1], [])] for t in range(self.num_stages)
        ]
        self.readers: list[dict[int, list[int]]] = [{} for _ in range(self.num_stages)]
        for t, forms in enumerate(self.in_stage):
            for f in sorted(forms):
                for s in model.ins[f]:
                    self.readers[t].setdefault(s, []).append(f)
        self._variables()
        for t in range(self.num_stages):
            self._flow(t)
            self._memory(t)
        self._results()

    def _variables(self) -> None:
        a, made = self.model.arrays, set[int]()
        for t in range(self.num_stages):
            for s in sorted(made):
                self.S[t, s] = self.program.variable()
            for f in self.in_stage[t]:
                self.R[t, f] = self.program.variable(float(a.time[f]) / self.total)
                made.update(self.model.outs[f])
        # a backward value, once made in its stage, may be stored but is not recomputed: its op belongs to that stage alone

    def _made(self, t: int, s: int) -> list[Term]:
        found = [(self.R[t, f], -1.0) for f in self.model.producers[s] if (t, f) in self.R]
        return [*found, (self.S[t, s], -1.0)] if (t, s) in self.S else found

    def _flow(self, t: int) -> None:
        program, model = self.program, self.model
        for f in self.in_stage[t]:
            for s in model.ins[f]:
                if model.producers[s]:
                    program.at_most([(self.R[t, f], 1.0), *self._made(t, s)])
        for (stage, s), stored in list(self.S.items()):
            if stage == t + 1:
                program.at_most([(stored, 1.0), *self._made(t, s)])
        due = self.forward if t == 0 else [self.backward[t - 1]]
        for op in due:
            program.at_most([(self.R[t, f], -1.0) for f in self.forms_of.get(op, []) if (t, f) in self.R], -1.0)
        for op in {model.forms[f][0] for f in self.in_stage[t] if not model.arrays.replayable[f]}:
            if op in self.forward and t:
                for f in self.forms_of[op]:
                    program.at_most([(self.R[t, f], 1.0)])

    def _memory(self, t: int) -> None:
        a, model = self.model.arrays, self.model
        maker = {s: min(model.producers[s]) for s in self.values}
        for f in self.in_stage[t]:
            own = set(model.outs[f])
            fixed = sum(float(a.size[s]) for s in own) + float(a.workspace[f])
            held: list[Term] = [(self.R[t, f], fixed / self.unit)]
            for s in self.values:
                size = float(a.size[s]) / self.unit
                if s in own or not size:
                    continue
                if maker[s] < f:
                    live = self._live(t, s, f)
                    held.extend([(live, size)] if live is not None else [])
                elif (t, s) in self.S:
                    held.append((self.S[t, s], size))
            self.program.at_most(held, self.room)

    def _live(self, t: int, s: int, f: int) -> int | None:
        """The variable that says whether s is still needed in stage t when form f runs; None if it cannot be."""
        readers = self.readers[t].get(s, [])
        j = bisect_left(readers, f)
        if j == len(readers):
            return self.S.get((t + 1, s))
        if (t, s, j) not in self.L:
            live = self.L[t, s, j] = self.program.variable()
            self.program.at_most([(self.R[t, readers[j]], 1.0), (live, -1.0)])
            after = self._live(t, s, readers[j] + 1)
            if after is not None:
                self.program.at_most([(after, 1.0), (live, -1.0)])
        return self.L[t, s, j]

    def _results(self) -> None:
        pinned = [s for s in self.values if self.model.arrays.pinned[s]]
        for s in pinned:
            self.program.at_most(self._made(self.num_stages - 1, s), -1.0)
            for t in range(self.num_stages - 1):
                if (t + 1, s) in self.S:  # a result once made is held
                    for variable, _ in self._made(t, s):
                        self.program.at_most([(variable, 1.0), (self.S[t + 1, s], -1.0)])

    def sequence(self, values: Floats) -> list[int]:
        return [f for t in range(self.num_stages) for f in sorted(self.in_stage[t]) if values[self.R[t, f]] > 0.5]
