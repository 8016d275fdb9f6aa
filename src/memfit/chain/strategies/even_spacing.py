"""Even spacing: when H-Revolve's table would be too large, checkpoints of the last level at even distances, Revolve in memory between.

    last level  │x0           x500          x1000         x1500       as many as it has slots, or as the period wants
    memory      │                                            x1611    each read once

No table and no proof of optimality; the bound beside it is `revolve.lower_bound`. This is periodic checkpointing with a limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from memfit.chain.moves import Advance, Back, Move, count_moves
from memfit.chain.plan import ChainPlan, cost_of, set_against_bound
from memfit.chain.problem import Chain
from memfit.chain.strategies.periodic import period_of, period_starts, segment_moves
from memfit.chain.strategies.revolve import lower_bound, revolve_moves


def plan_evenly_spaced(chain: Chain) -> ChainPlan:
    """A plan for a chain whose first level is free, using that and its last level."""
    begin = time.perf_counter()
    segments = chain.capacity(len(chain.levels) - 1)

    def emit() -> Iterator[Move]:
        return evenly_spaced_moves(chain, chain.num_steps, max_segments=segments)

    cost = cost_of(chain, count_moves(emit(), len(chain.levels)))
    reason = "H-Revolve's table would be too large for this length; checkpoints are spread evenly instead."
    return set_against_bound("spread", chain, cost, lower_bound(chain), emit, begin=begin, reason=reason)


def evenly_spaced_moves(chain: Chain, num_steps: int, *, offset: int = 0, max_segments: int | None = None) -> Iterator[Move]:
    """Reverse `num_steps` forwards from x_offset; the period is the paper's, or longer where `max_segments` says so."""
    memory, deepest = chain.capacity(0), chain.levels[-1]
    level = len(chain.levels) - 1
    if level == 0 or max_segments == 0:
        yield from revolve_moves(num_steps, memory, offset=offset)
        return
    if memory == 0:
        yield from revolve_moves(num_steps, max_segments or num_steps, offset=offset, level=level)
        return
    period = num_steps + 1 if chain.forward_cost == 0 else period_of(memory, deepest.write_cost, deepest.read_cost, chain.forward_cost)
    if max_segments is not None:
        period = max(period, -(-max(num_steps, 1) // max_segments))
    for move in segment_moves(num_steps, period_starts(num_steps, period), memory):
        if isinstance(move, Advance):
            yield Advance(move.start + offset, move.stop + offset)
        elif isinstance(move, Back):
            yield Back(move.step + offset)
        else:
            yield type(move)(move.step + offset, level if move.level == 1 else 0)
