"""Periodic Disk-Revolve: a disk checkpoint every `period` steps, each read once, Revolve in memory between (Aupy and Herrmann, 2017).

    disk    │x0        x15        x30        x45          nothing to optimise at run time, asymptotically optimal
    memory  │                                   x50 x56    among schedules that read each disk checkpoint once

The period comes from costs alone, not from the length, so no table is made and the length may be unknown in advance:
beta(c, t) for the least t with beta(c + 1, t) > (wd + rd) / uf.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

from memfit.chain.bounds import lower_bound
from memfit.chain.disk_revolve import check_disk_chain
from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write, count
from memfit.chain.plan import ChainPlan, cost_of
from memfit.chain.problem import Chain
from memfit.chain.revolve import beta, num_forwards, revolve_moves
from memfit.core.errors import BadInput
from memfit.core.outcome import Status


def period_of(memory_slots: int, write_cost: float, read_cost: float, forward_cost: float) -> int:
    """Steps between disk checkpoints."""
    if memory_slots < 1:
        return 1
    if forward_cost <= 0:
        raise BadInput(f"the forward cost is {forward_cost}: when recomputing is free no period is best; never write to disk.")
    repeats = 0
    while beta(memory_slots + 1, repeats) <= (write_cost + read_cost) / forward_cost:
        repeats += 1
    return beta(memory_slots, repeats)


def plan_periodic(chain: Chain, *, period: int | None = None) -> ChainPlan:
    """Disk checkpoints at fixed distance. `period` None takes the paper's; the whole chain in memory if that is cheaper."""
    begin = time.perf_counter()
    check_disk_chain("Periodic Disk-Revolve", chain)
    if period is not None and period < 1:
        raise BadInput(f"a period of {period} steps: give 1 or more.")
    memory, disk = chain.capacity(0), chain.levels[1]
    if period is None and chain.forward_cost == 0:
        period = chain.num_steps + 1  # recomputing is free: never write
    distance = period or period_of(memory, disk.write_cost, disk.read_cost, chain.forward_cost)
    if memory < 1:
        distance = 1
    starts = _starts(chain.num_steps, distance)
    cost = cost_of(chain, count(_moves(chain.num_steps, starts, memory), 2))
    if memory and (period is None or len(starts) == 1):
        alone = num_forwards(chain.num_steps + 1, memory) * chain.forward_cost + (chain.num_steps + 1) * chain.backward_cost
        if alone <= cost:
            starts, cost = (0,), alone
    chosen = starts
    return ChainPlan(
        algorithm="periodic",
        chain=chain,
        status=Status.OPTIMAL if cost <= lower_bound(chain) else Status.FEASIBLE,
        cost=cost,
        lower_bound=lower_bound(chain),
        emit=lambda: _moves(chain.num_steps, chosen, memory),
        seconds=time.perf_counter() - begin,
        reason=f"A disk checkpoint every {distance} steps, Revolve in memory between them.",
    )


def periodic_moves(chain: Chain, num_steps: int, *, offset: int = 0, max_segments: int | None = None) -> Iterator[Move]:
    """Reverse `num_steps` forwards from x_offset with disk checkpoints (on the chain's last level) at even distances.

    For lengths whose table would take too long: the period is the paper's, or longer where `max_segments` says so.
    """
    memory, disk = chain.capacity(0), chain.levels[-1]
    level = len(chain.levels) - 1
    if level == 0 or max_segments == 0:
        yield from revolve_moves(num_steps, memory, offset=offset)
        return
    if memory == 0:
        yield from revolve_moves(num_steps, max_segments or num_steps, offset=offset, level=level)
        return
    period = num_steps + 1 if chain.forward_cost == 0 else period_of(memory, disk.write_cost, disk.read_cost, chain.forward_cost)
    if max_segments is not None:
        period = max(period, -(-max(num_steps, 1) // max_segments))
    for move in _moves(num_steps, _starts(num_steps, period), memory):
        if isinstance(move, Advance):
            yield Advance(move.start + offset, move.stop + offset)
        elif isinstance(move, Back):
            yield Back(move.step + offset)
        else:
            yield type(move)(move.step + offset, level if move.level == 1 else 0)


def _starts(num_steps: int, period: int) -> tuple[int, ...]:
    """First states of the segments; x_l itself never starts one, because it is used where it is."""
    return tuple(range(0, max(num_steps, 1), period))


def _moves(num_steps: int, starts: tuple[int, ...], memory: int) -> Iterator[Move]:
    for start, stop in pairwise(starts):
        yield Write(start, 1)
        yield Advance(start, stop)
    last = starts[-1]
    if memory:
        yield from revolve_moves(num_steps - last, memory, offset=last)
    else:
        yield from _without_memory(num_steps, last)
    for start, stop in reversed(list(pairwise(starts))):
        yield Read(start, 1)
        yield Drop(start, 1)
        if stop - start == 1:
            yield Back(start)
        else:
            yield from revolve_moves(stop - start - 1, memory, offset=start)


def _without_memory(num_steps: int, last: int) -> Iterator[Move]:
    """No memory slot: the last state but one waits on disk like all others."""
    if num_steps > last:
        yield Write(last, 1)
        yield Advance(last, num_steps)
    yield Back(num_steps)
    if num_steps > last:
        yield Read(last, 1)
        yield Drop(last, 1)
        yield Back(last)
