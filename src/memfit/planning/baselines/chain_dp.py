"""The step as a heterogeneous chain (rotor: Beaumont et al. 2019), cut where little crosses.

    forward ops   [ stage 0 | stage 1 | stage 2 ]  turn        a border is cheap where few bytes are read across it:
    backward ops  [ ... of stage 2 | of stage 1 | of stage 0 ]  an articulation point where one tensor is, a skip connection more

Each stage's sizes and times are summed from its ops, `chain.heterogeneous` finds the best persistent schedule, and its
moves are played back as ops. The chain is only a model of the graph (a border may be read from far away), so budgets
below the real one, and above it, are tried and what comes out is judged like any other plan. Near the floor, where values
must be recomputed more than once, it is the seed the cut LP cannot give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.chain.strategies.heterogeneous import Stage, Undo, plan_heterogeneous
from memfit.core.errors import MemfitError
from memfit.core.outcome import Outcome
from memfit.planning.cuts.just_in_time import turning_point
from memfit.planning.model.fast_judge import drop_dead, peak_and_time, usage_of
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem

SHARES = (2.0, 1.6, 1.3, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainDp:
    name: str = "chain_dp"
    max_stages: int = 40

    def plan(self, problem: Problem) -> Outcome:
        best: tuple[tuple[int, int], Ints] | None = None
        for _, sequence in chain_sequences(problem.model, problem.limit_bytes, self.max_stages):
            peak, time = peak_and_time(problem.model.arrays, sequence)
            key = (max(peak - problem.limit_bytes, 0), time)
            if peak >= 0 and (best is None or key < best[0]):
                best = (key, sequence)
        return judge_sequence(problem, planner=self.name, sequence=None if best is None else best[1])


def chain_sequences(
    model: Model, limit_bytes: int, max_stages: int = 40, shares: tuple[float, ...] = SHARES
) -> Iterator[tuple[float, Ints]]:
    """The chain's plans for several shares of the budget, as sequences of forms."""
    chain = _Chain(model, max_stages)
    room = limit_bytes - chain.constant_bytes
    for share in shares:
        try:
            plan = plan_heterogeneous(chain.stages, budget=max(int(room * share), 0), input_bytes=0, num_grid=300)
        except MemfitError:
            continue  # too little for the chain as modelled
        yield share, chain.play(plan.moves())


class _Chain:
    def __init__(self, model: Model, max_stages: int) -> None:
        self.model = model
        a = model.arrays
        agenda = np.array(model.agenda, np.int64)
        self.turn = turning_point(model, usage_of(a, agenda)) if len(agenda) else 0
        forward, backward = list(model.agenda[: self.turn + 1]), list(model.agenda[self.turn + 1 :])
        self.constant_bytes = int(a.base_bytes + a.size[a.source].sum() + a.size[a.pinned].sum())
        borders = _choose_borders(_count_crossing(model, forward), [self._transient(f) for f in forward], max_stages)
        self.forward = [forward[i:j] for i, j in zip([0, *borders], [*borders, len(forward)], strict=True)]
        self.home = {s: k for k, forms in enumerate(self.forward) for f in forms for s in model.outs[f]}
        self.backward = self._group(backward)
        self.stages = tuple(self._stage(k) for k in range(len(self.forward)))

    def _group(self, backward: list[int]) -> list[list[int]]:
        """Backward ops by the lowest stage read so far: groups follow each other from the last stage to the first."""
        groups: list[list[int]] = [[] for _ in self.forward]
        current = len(self.forward) - 1
        for f in backward:
            current = min([current, *(self.home[s] for s in self.model.ins[f] if s in self.home)])
            groups[current].append(f)
        return groups

    def _stage(self, k: int) -> Stage:
        a, model = self.model.arrays, self.model
        later_forward = {s for forms in self.forward[k + 1 :] for f in forms for s in model.ins[f]}
        read_backward = {s for forms in self.backward for f in forms for s in model.ins[f]}
        output = sum(int(a.size[s]) for s, home in self.home.items() if home <= k and s in later_forward)
        saved = sum(int(a.size[s]) for s, home in self.home.items() if home == k and s in read_backward and s not in later_forward)
        lower_groups = {s for forms in self.backward[:k] for f in forms for s in model.ins[f]}
        gradient = sum(int(a.size[s]) for forms in self.backward[k:] for f in forms for s in model.outs[f] if s in lower_groups)
        return Stage(
            forward_s=float(sum(a.time[f] for f in self.forward[k])) * 1e-9,
            backward_s=float(sum(a.time[f] for f in self.backward[k])) * 1e-9,
            output_bytes=output,
            saved_bytes=output + saved,
            gradient_bytes=gradient,
        )

    def _transient(self, form: int) -> int:
        """What an op makes and holds beside what the chain counts: its outputs and workspace."""
        a = self.model.arrays
        return int(a.workspace[form]) + sum(int(a.size[s]) for s in self.model.outs[form])

    def play(self, moves: Iterator[object]) -> Ints:
        ran: set[int] = set()
        sequence: list[int] = []
        for move in moves:
            forms = self.backward[move.step] if isinstance(move, Undo) else self.forward[move.step]  # type: ignore[attr-defined]
            for f in forms:
                if f not in ran or self.model.arrays.replayable[f]:
                    sequence.append(f)
                    ran.add(f)
        sequence.extend(f for f in self.model.agenda if f not in ran)
        return np.asarray(drop_dead(self.model.arrays, np.array(sequence, np.int64)))


def _count_crossing(model: Model, forward: list[int]) -> list[int]:
    """Bytes made up to each forward op and read by a later forward op."""
    a = model.arrays
    last = {s: i for i, f in enumerate(forward) for s in model.ins[f]}
    change = [0] * (len(forward) + 1)
    for i, f in enumerate(forward):
        for s in model.outs[f]:
            if last.get(s, i) > i:
                change[i] += int(a.size[s])
                change[last[s]] -= int(a.size[s])
    return [int(x) for x in np.cumsum(change)[:-1]]


def _choose_borders(crossing: list[int], made: list[int], max_stages: int) -> list[int]:
    """Positions after which to cut: in each of `max_stages` slices of equal bytes the one that least crosses."""
    share = np.cumsum(np.array(made, np.float64) + 1.0)
    slices = np.minimum((share / share[-1] * max_stages).astype(np.int64), max_stages - 1) if len(made) else np.zeros(0, np.int64)
    chosen = set()
    for k in range(max_stages):
        inside = np.flatnonzero(slices == k)
        if len(inside):
            chosen.add(int(min(inside, key=lambda i: crossing[i])) + 1)
    return sorted(x for x in chosen if x < len(crossing))
