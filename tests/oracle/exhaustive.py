"""Exhaustive search on graphs of up to about 8 ops: what every planner is held against.

    minimum_peak(graph, costs)                  the least peak of an order that runs each op once
    minimum_budget(graph, costs)                the least peak of any schedule, recomputation allowed
    minimum_time(graph, costs, budget_bytes)    the least time of any schedule inside the budget, recomputation allowed

Each returns (value, Schedule), and the schedule has been judged by `core.simulate`: the value is what the judge saw. A
budget that no schedule can meet raises InfeasibleBudget. With `variants=True` (the default for the last two) every form
of every op may be chosen; without, ops run as written. Copies to other levels are not searched.

A state is the set of tensors present and the set of ops that have run, both as bit masks; steps are edges; Dijkstra
finds the least sum (time) or the least maximum (peak).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.core.budget import Budget
from memfit.core.costs import Costs, uniform_costs
from memfit.core.errors import InfeasibleBudget
from memfit.core.graph import Graph, Op, Variant
from memfit.core.schedule import Compute, Free, Schedule, Step
from memfit.core.simulate import simulate

MAX_OPS = 12
State = tuple[int, int]  # tensors present, ops that have run


def minimum_peak(graph: Graph, costs: Costs | None = None, *, variants: bool = False) -> tuple[int, Schedule]:
    """Each op exactly once, in any order that its inputs allow; values are freed when nobody will read them."""
    search = _Search(graph, costs or uniform_costs(graph), variants=variants, once=True)
    peak, schedule = search.run(_by_peak, None)
    assert simulate(graph, schedule, search.costs).peak_bytes == peak
    return peak, schedule


def minimum_budget(graph: Graph, costs: Costs | None = None, *, variants: bool = True) -> tuple[int, Schedule]:
    """The least peak of any legal schedule: below it a budget is infeasible, at it it is not."""
    search = _Search(graph, costs or uniform_costs(graph), variants=variants, once=False)
    peak, schedule = search.run(_by_peak, None)
    assert simulate(graph, schedule, search.costs).peak_bytes == peak
    return peak, schedule


def minimum_time(
    graph: Graph, costs: Costs | None = None, budget_bytes: int | None = None, *, variants: bool = True
) -> tuple[int, Schedule]:
    """The least time of any legal schedule whose peak is at most `budget_bytes`."""
    search = _Search(graph, costs or uniform_costs(graph), variants=variants, once=False)
    time_ns, schedule = search.run(_by_time, budget_bytes)
    assert simulate(graph, schedule, search.costs, Budget(device_bytes=budget_bytes)).time_ns == time_ns
    return time_ns, schedule


def _by_peak(so_far: int, time_ns: int, held_bytes: int) -> int:
    return max(so_far, held_bytes)


def _by_time(so_far: int, time_ns: int, held_bytes: int) -> int:
    return so_far + time_ns


@dataclass(frozen=True, slots=True)
class _Move:
    """A form as masks of tensors. `fresh` are (tensors of the storage, tensors made, bytes)."""

    step: Compute
    inputs: int
    views: int
    fresh: tuple[tuple[int, int, int], ...]
    takeovers: tuple[tuple[int, int, int], ...]  # (all tensors of new, tensors made, all tensors of old)
    time_ns: int
    workspace_bytes: int
    replayable: bool
    seeded: bool


class _Search:
    def __init__(self, graph: Graph, costs: Costs, *, variants: bool, once: bool) -> None:
        if len(graph.ops) > MAX_OPS:
            raise ValueError(f"exhaustive search is for at most {MAX_OPS} ops, not {len(graph.ops)}")
        self.graph, self.costs, self.once = graph, costs, once
        self.eager = once and not variants  # then it is known who will still read what
        self.inside = [_mask(graph.tensors_of[s.id]) for s in graph.storages]  # storage -> its tensors
        self.moves = [self._move(op, v) for op in graph.ops for v in range(len(op.forms) if variants else 1)]
        self.results = _mask(graph.results)
        makeable = 0
        for move in self.moves:
            makeable |= _mask(graph.ops[move.step.op].form(move.step.variant).outputs)
        self.pinned = {s.id for s in graph.storages if self.inside[s.id] & self.results & ~makeable}
        self.remembered = _mask(op.id for op in graph.ops if once or not op.replayable or op.seeded)
        self.seeded = _mask(op.id for op in graph.ops if op.seeded)

    def _move(self, op: Op, variant: int) -> _Move:
        form: Op | Variant = op.form(variant)
        graph, storage_of = self.graph, self.graph.storage_of
        read = {storage_of(t) for t in form.inputs}
        new_of = {storage_of(new): storage_of(old) for new, old in form.inplace_of}
        made: dict[int, int] = {}
        for t in form.outputs:
            made[storage_of(t)] = made.get(storage_of(t), 0) | 1 << t
        return _Move(
            step=Compute(op.id, variant),
            inputs=_mask(form.inputs),
            views=_mask(t for t in form.outputs if storage_of(t) in read),
            fresh=tuple((self.inside[s], m, graph.storages[s].size_bytes) for s, m in made.items() if s not in read and s not in new_of),
            takeovers=tuple((self.inside[new], made[new], self.inside[old]) for new, old in new_of.items()),
            time_ns=self.costs.time_ns(op.id, variant),
            workspace_bytes=self.costs.workspace(op.id, variant),
            replayable=op.replayable,
            seeded=op.seeded,
        )

    def run(self, combine: Callable[[int, int, int], int], budget_bytes: int | None) -> tuple[int, Schedule]:
        start: State = (_mask(self.graph.sources), 0)
        limit = float("inf") if budget_bytes is None else budget_bytes
        least = combine(0, 0, self._held(start[0]))
        best: dict[State, int] = {start: least}
        came: dict[State, tuple[State, tuple[Step, ...]]] = {}
        queue = [(least, 0, start)] if self._held(start[0]) <= limit else []
        pushed = 0
        while queue:
            value, _, state = heapq.heappop(queue)
            if value > best[state]:
                continue
            if self._is_goal(state):
                return value, self._trace(came, state)
            for after, steps, time_ns, held in self._edges(state):
                reached = combine(value, time_ns, held)
                if held <= limit and reached < best.get(after, reached + 1):
                    best[after], came[after] = reached, (state, steps)
                    pushed += 1
                    heapq.heappush(queue, (reached, pushed, after))
        raise InfeasibleBudget(f"no schedule holds at most {budget_bytes} bytes: all {len(best)} reachable states were tried.")

    def _is_goal(self, state: State) -> bool:
        present, ran = state
        return not self.results & ~present and (not self.once or ran == self.remembered)

    def _edges(self, state: State) -> Iterator[tuple[State, tuple[Step, ...], int, int]]:
        """(state after, steps, time, most bytes held during them)."""
        present, ran = state
        held = self._held(present)
        for move in self.moves:
            if move.inputs & ~present or not self._may_run(move, ran):
                continue
            after, during = self._apply(move, present, held)
            ran_after = ran | (1 << move.step.op & self.remembered)
            freed = self._unneeded(after, ran_after) if self.eager else ()
            for storage in freed:
                after &= ~self.inside[storage]
            yield (after, ran_after), (move.step, *map(Free, freed)), move.time_ns, during
        if self.eager and not ran:  # a source that nobody reads need not wait for the first op
            for storage in self._unneeded(present, ran):
                yield (present & ~self.inside[storage], ran), (Free(storage),), 0, 0
        if not self.eager:
            for storage, tensors in enumerate(self.inside):
                if present & tensors and storage not in self.pinned:
                    yield (present & ~tensors, ran), (Free(storage),), 0, 0

    def _may_run(self, move: _Move, ran: int) -> bool:
        if ran >> move.step.op & 1:
            return move.replayable and not self.once
        return not (move.seeded and (ran & self.seeded) >> move.step.op)

    def _apply(self, move: _Move, present: int, held: int) -> tuple[int, int]:
        during = held + move.workspace_bytes
        after = present
        for inside, made, size in move.fresh:
            during += size  # allocated, or a second copy for this step
            if not present & inside:
                after |= made
        for new, made, old in move.takeovers:
            after &= ~old
            if not present & new:
                after |= made
        return after | move.views, during

    def _unneeded(self, present: int, ran: int) -> tuple[int, ...]:
        wanted = self.results
        for move in self.moves:
            if not ran >> move.step.op & 1:
                wanted |= move.inputs
        return tuple(s for s, tensors in enumerate(self.inside) if present & tensors and not wanted & tensors)

    def _held(self, present: int) -> int:
        return sum(s.size_bytes for s in self.graph.storages if present & self.inside[s.id])

    @staticmethod
    def _trace(came: dict[State, tuple[State, tuple[Step, ...]]], state: State) -> Schedule:
        steps: list[Step] = []
        while state in came:
            state, edge = came[state]
            steps[:0] = edge
        return Schedule(steps=tuple(steps))


def _mask(ids: object) -> int:
    mask = 0
    for i in ids:  # type: ignore[attr-defined]
        mask |= 1 << i
    return mask
