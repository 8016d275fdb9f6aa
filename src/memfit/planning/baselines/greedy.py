"""Greedy eviction with just-in-time recompute: dynamic tensor rematerialization (Kirisame et al. 2021) with a crystal ball.

The step is played once. When the next op does not fit, the value with the least

    time to rebuild it (with whatever it needs that is gone)  /  (bytes x steps until its next use)

is evicted; when an evicted value is read it is rebuilt first, under the same rule. DTR guesses the next use from
staleness; planning offline we know it. No guarantee, but it needs no structure at all.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from memfit.core.outcome import Outcome
from memfit.planning.model.reduce import Ints, Model
from memfit.planning.outcome import judge_sequence
from memfit.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    name: str = "greedy"
    max_growth: int = 20
    """Give up when the sequence is this many times longer than the step: eviction is thrashing."""
    time_share: float = 1.0
    """Of the time left, how much may be spent."""

    def plan(self, problem: Problem) -> Outcome:
        return judge_sequence(problem, planner=self.name, sequence=self.sequence(problem))

    def sequence(self, problem: Problem) -> Ints | None:
        player = _Player(problem.model, problem.limit_bytes, self.max_growth * (len(problem.model.agenda) + 1))
        found = player.play(perf_counter() + max(self.time_share * problem.seconds_left, 1.0))
        return None if found is None else np.array(found, np.int64)


class _Player:
    def __init__(self, model: Model, limit: int, max_length: int) -> None:
        self.model, self.limit, self.max_length = model, limit, max_length
        a = model.arrays
        self.size = [int(x) for x in a.size]
        self.time = [int(x) for x in a.time]
        self.pinned, self.replayable = a.pinned.tolist(), a.replayable.tolist()
        self.have = {s for s in range(model.num_storages) if a.source[s]}
        self.held = int(a.base_bytes) + sum(self.size[s] for s in self.have)
        self.uses: list[list[int]] = [[] for _ in range(model.num_storages)]
        for i, f in enumerate(model.agenda):
            for s in model.ins[f]:
                self.uses[s].append(i)
        # what cannot be made again stays: a later recomputation may need it (it is freed after its last use all the same)
        self.fixed = set(self.have) | {s for s in range(model.num_storages) if self._irreplaceable(s)}
        self.lock = [0] * model.num_storages
        self.sequence: list[int] = []
        self.now = 0

    def _irreplaceable(self, storage: int) -> bool:
        producers = self.model.producers[storage]
        return bool(self.pinned[storage]) or not producers or not self.replayable[producers[0]] or bool(self.model.takes[producers[0]])

    def play(self, deadline_s: float = float("inf")) -> list[int] | None:
        for i, f in enumerate(self.model.agenda):
            self.now = i
            if perf_counter() > deadline_s or not self._run(f):
                return None
            for s in [s for s in self.have if s not in self.fixed and self._next_use(s) is None]:
                self._drop(s)
        return self.sequence

    def _run(self, target: int) -> bool:
        """Run a form, rebuilding its missing inputs first; an explicit stack, since chains are long."""
        stack = [target]
        self._hold(target, 1)
        while stack:
            if len(self.sequence) > self.max_length:
                return False
            f = stack[-1]
            missing = next((s for s in self.model.ins[f] if s not in self.have), None)
            if missing is not None:
                stack.append(self.model.producers[missing][0])
                self._hold(stack[-1], 1)
                continue
            fresh = [s for s in self.model.outs[f] if s not in self.have]
            if not self._make_room(sum(self.size[s] for s in self.model.outs[f]) + int(self.model.arrays.workspace[f])):
                return False
            self.sequence.append(f)
            self.have.update(fresh)
            self.held += sum(self.size[s] for s in fresh)
            for new, old in self.model.takes[f]:
                self.have.discard(old)
                self.have.add(new)
            self._hold(stack.pop(), -1)
            for s in fresh:  # rebuilt by the way and read by nobody: gone at once
                if not self.lock[s] and not self.pinned[s] and self._next_use(s) is None and f != target:
                    self._drop(s)
        return True

    def _hold(self, form: int, amount: int) -> None:
        for s in self.model.ins[form]:
            self.lock[s] += amount

    def _drop(self, storage: int) -> None:
        if not self.lock[storage]:
            self.have.discard(storage)
            self.held -= self.size[storage]

    def _make_room(self, needed: int) -> bool:
        while self.held + needed > self.limit:
            candidates = [s for s in self.have if not self.lock[s] and s not in self.fixed and self.size[s]]
            if not candidates:
                return False
            self._drop(min(candidates, key=self._score))
        return True

    def _score(self, storage: int) -> float:
        upcoming = self._next_use(storage)
        distance = max((len(self.model.agenda) if upcoming is None else upcoming) - self.now, 1)
        return (self._rebuild_time(storage) + 1) / (self.size[storage] * distance)

    def _next_use(self, storage: int) -> int | None:
        uses = self.uses[storage]
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else None

    def _rebuild_time(self, storage: int) -> int:
        """Time of the producer and of all evicted values it needs, each once."""
        total, seen, pending = 0, set[int](), [storage]
        while pending:
            f = self.model.producers[pending.pop()][0]
            if f not in seen:
                seen.add(f)
                total += self.time[f]
                pending.extend(s for s in self.model.ins[f] if s not in self.have and self.model.producers[s])
        return total
