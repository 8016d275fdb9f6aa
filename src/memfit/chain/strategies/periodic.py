"""Periodic Disk-Revolve: a disk checkpoint every `period` steps, each read once, Revolve in memory between (Aupy and Herrmann, 2017).

    disk    │x0        x15        x30        x45          nothing to optimise at run time, asymptotically optimal
    memory  │                                   x50 x56    among schedules that read each disk checkpoint once

The period comes from costs alone, not from the length, so no table is made and the length may be unknown in advance:
beta(c, t) for the least t with beta(c + 1, t) > (wd + rd) / uf.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write, count_moves
from memfit.chain.plan import ChainPlan, cost_of, set_against_bound
from memfit.chain.problem import Chain
from memfit.chain.strategies.revolve import beta, lower_bound, num_forwards, revolve_moves
from memfit.core.errors import BadInput


def check_disk_chain(algorithm: str, chain: Chain) -> None:
    """Refuse anything but a free memory and an unbounded disk."""
    levels = chain.levels
    if len(levels) != 2 or levels[0].write_cost or levels[0].read_cost or not chain.is_unbounded(1):
        raise BadInput(
            f"{algorithm} has a free memory and a disk with room for all {chain.num_steps} states, as disk_chain() makes them; "
            "use H-Revolve (plan_hrevolve) for bounded disks and for memory that costs."
        )


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
    starts = period_starts(chain.num_steps, distance)
    cost = cost_of(chain, count_moves(segment_moves(chain.num_steps, starts, memory), 2))
    if memory and (period is None or len(starts) == 1):
        alone = num_forwards(chain.num_steps + 1, memory) * chain.forward_cost + (chain.num_steps + 1) * chain.backward_cost
        if alone <= cost:
            starts, cost = (0,), alone
    reason = f"A disk checkpoint every {distance} steps, Revolve in memory between them."
    emit = partial(segment_moves, chain.num_steps, starts, memory)
    return set_against_bound("periodic", chain, cost, lower_bound(chain), emit, begin=begin, reason=reason)


def period_starts(num_steps: int, period: int) -> tuple[int, ...]:
    """First states of the segments; x_l itself never starts one, because it is used where it is."""
    return tuple(range(0, max(num_steps, 1), period))


def segment_moves(num_steps: int, starts: tuple[int, ...], memory: int) -> Iterator[Move]:
    for start, stop in pairwise(starts):
        yield Write(start, 1)
        yield Advance(start, stop)
    last = starts[-1]
    if memory:
        yield from revolve_moves(num_steps - last, memory, offset=last)
    else:
        yield from _moves_without_memory(num_steps, last)
    for start, stop in reversed(list(pairwise(starts))):
        yield Read(start, 1)
        yield Drop(start, 1)
        if stop - start == 1:
            yield Back(start)
        else:
            yield from revolve_moves(stop - start - 1, memory, offset=start)


def _moves_without_memory(num_steps: int, last: int) -> Iterator[Move]:
    """No memory slot: the last state but one waits on disk like all others."""
    if num_steps > last:
        yield Write(last, 1)
        yield Advance(last, num_steps)
    yield Back(num_steps)
    if num_steps > last:
        yield Read(last, 1)
        yield Drop(last, 1)
        yield Back(last)
