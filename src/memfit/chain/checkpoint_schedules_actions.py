"""Our schedules for codes written for the `checkpoint-schedules` action interface (Dolci et al., 2024).

    for action in ActionSchedule(plan_hrevolve(chain)):       Forward, Reverse, Copy, Move, EndForward, EndReverse:
        execute(action)                                        their own classes, so their dispatch works unchanged

There a forward step that an adjoint step follows is run once more with its adjoint data kept, so `max_n` steps there are a
chain of `max_n - 1` forwards here, whose last state is x_{max_n - 1}: B_i is Forward(i, i + 1) with data, then Reverse(i + 1, i).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoint_schedules import CheckpointSchedule, Copy, EndForward, EndReverse, Forward, Reverse, StorageType
from checkpoint_schedules import Move as MoveAction

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan
from memfit.core.errors import Unsupported

LEVELS = (StorageType.RAM, StorageType.DISK)


class ActionSchedule(CheckpointSchedule):  # type: ignore[misc]
    """A plan as their schedule: one adjoint calculation. Level 0 is RAM, level 1 is disk."""

    def __init__(self, plan: ChainPlan) -> None:
        super().__init__(max_n=plan.chain.num_steps + 1)
        if len(plan.chain.levels) > len(LEVELS):
            raise Unsupported(
                f"the plan uses {len(plan.chain.levels)} storage levels, the checkpoint-schedules interface knows RAM and disk: "
                "plan with at most two levels."
            )
        plan.require()
        self._plan = plan
        self._exhausted = False

    def _iterator(self) -> Iterator[Any]:
        moves = _Ahead(self._plan.moves())
        for move in moves:
            if isinstance(move, Back):
                yield from self._back(move.step)
            elif isinstance(move, Advance):
                yield self._forward(move, None)
            elif isinstance(move, Write):
                following = next(moves)
                assert isinstance(following, Advance)
                assert following.start == move.step
                yield self._forward(following, move.level)
            elif isinstance(move, Read):
                self._n = move.step
                moved = isinstance(moves.peek(), Drop)  # a Drop right after a Read is always of what was read
                if moved:
                    next(moves)
                yield (MoveAction if moved else Copy)(move.step, LEVELS[move.level], StorageType.WORK)
            else:
                yield MoveAction(move.step, LEVELS[move.level], StorageType.NONE)
        self._exhausted = True
        yield EndReverse()

    def _forward(self, move: Advance, level: int | None) -> Any:
        self._n = move.stop
        if level is None:
            return Forward(move.start, move.stop, False, False, StorageType.WORK)
        return Forward(move.start, move.stop, True, False, LEVELS[level])

    def _back(self, step: int) -> Iterator[Any]:
        self._n = step + 1
        yield Forward(step, step + 1, False, True, StorageType.WORK)
        if step == self._max_n - 1:
            yield EndForward()
        self._r += 1
        yield Reverse(step + 1, step, True)

    @property
    def is_exhausted(self) -> bool:
        return self._exhausted

    def uses_storage_type(self, storage_type: Any) -> bool:
        levels = self._plan.chain.levels
        return any(kind == storage_type and level.slots != 0 for kind, level in zip(LEVELS, levels, strict=False))


class _Ahead(Iterator[Move]):
    """An iterator that shows its next element."""

    def __init__(self, source: Iterator[Move]) -> None:
        self._source = source
        self._next: list[Move] = []

    def __next__(self) -> Move:
        return self._next.pop() if self._next else next(self._source)

    def peek(self) -> Move | None:
        if not self._next:
            following = next(self._source, None)
            if following is None:
                return None
            self._next.append(following)
        return self._next[0]
