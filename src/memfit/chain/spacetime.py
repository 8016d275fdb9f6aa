"""A schedule as a picture needs it: where the computation is at every moment, and which states are kept how long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.chain.moves import Advance, Back, Read, Write
from memfit.chain.plan import ChainPlan

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Times are in the chain's unit, one thing after another. Rows: `advances` (begin, start, end, stop), `backs` (begin, step, end),
    `kept` (level, step, begin, end)."""

    num_steps: int
    total_time: float
    advances: Rows
    backs: Rows
    kept: Rows


def trace(plan: ChainPlan) -> Trace:
    """Follow the moves with a clock."""
    chain = plan.chain
    clock = 0.0
    advances: list[tuple[float, ...]] = []
    backs: list[tuple[float, ...]] = []
    kept: list[tuple[float, ...]] = []
    since: dict[tuple[int, int], float] = {}
    for move in plan.moves():
        begin = clock
        if isinstance(move, Advance):
            clock += (move.stop - move.start) * chain.forward_cost
            advances.append((begin, move.start, clock, move.stop))
        elif isinstance(move, Back):
            clock += chain.backward_cost
            backs.append((begin, move.step, clock))
        elif isinstance(move, Write):
            clock += chain.levels[move.level].write_cost
            since[move.level, move.step] = begin
        elif isinstance(move, Read):
            clock += chain.levels[move.level].read_cost
        else:
            kept.append((move.level, move.step, since.pop((move.level, move.step)), clock))
    return Trace(
        num_steps=chain.num_steps,
        total_time=clock,
        advances=np.array(advances, dtype=np.float64).reshape(-1, 4),
        backs=np.array(backs, dtype=np.float64).reshape(-1, 3),
        kept=np.array(kept, dtype=np.float64).reshape(-1, 4),
    )
