"""Disk-Revolve: a bounded free memory and an unbounded disk that costs (Aupy, Herrmann, Hovland and Robert, 2016).

    disk    │x0            x30           x60          written once, during the first sweep
    memory  │                                 x71 x80 Revolve inside the last part, then inside the part before, ...

    1D(l)   = min( Opt_0(l), min_j [ j uf + Opt_0(l-j) + rd + 1D(j-1) ] )            x_0 on disk
    Opt_∞(l) = min( Opt_0(l), min_j [ wd + j uf + Opt_∞(l-j) + rd + 1D(j-1) ] )      x_0 in the buffer

It is H-Revolve whose last level has room for everything; two rows instead of a table.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.chain.plan import ChainPlan
from memfit.chain.problem import Chain, StorageLevel
from memfit.chain.strategies.hrevolve import plan_hrevolve
from memfit.chain.strategies.periodic import check_disk_chain


def disk_chain(
    num_steps: int,
    memory_slots: int,
    *,
    write_cost: float,
    read_cost: float,
    forward_cost: float = 1.0,
    backward_cost: float = 1.0,
) -> Chain:
    """The problem of the paper: `memory_slots` free slots and a disk without limit."""
    levels = (StorageLevel(slots=memory_slots), StorageLevel(slots=None, write_cost=write_cost, read_cost=read_cost))
    return Chain(num_steps=num_steps, levels=levels, forward_cost=forward_cost, backward_cost=backward_cost)


def plan_disk_revolve(chain: Chain) -> ChainPlan:
    """The optimal schedule of `disk_chain`."""
    check_disk_chain("Disk-Revolve", chain)
    return replace(plan_hrevolve(chain), algorithm="disk-revolve")
