"""H-Revolve: the optimal schedule over any number of storage levels with real costs (Herrmann and Pallez, 2020).

    level 1  │x0                      x40               deeper levels hold the coarse checkpoints,
    level 0  │            x12    x25                    level 0 the fine ones inside the last part
    buffer   │ ───────────────────────────────> x_l

Opt'_k(l, m): x_0 is at level k, m slots there counting its own; Opt_k(l, m): x_0 is in the working buffer only.

    Opt'_k(l, m) = min( Opt_{k-1}(l, c_{k-1}),  min_{1<=j<=l} [ j uf + Opt_k(l-j, m-1) + r_k + Opt'_k(j-1, m) ] )
    Opt_k (l, m) = min( Opt_{k-1}(l, c_{k-1}),  w_k + Opt'_k(l, m) ),      Opt_k(l, 0) = Opt_{k-1}(l, c_{k-1}),  Opt(0) = ub

The recurrence supposes that deeper levels cost no less, so levels are sorted first; where one is cheaper to write and
dearer to read than another there is no such order, and `unsorted_levels.py` takes over. A free first level is Revolve in closed
form. A level with room for every state needs one row instead of l: anything written there later could have been written
during the first sweep for the same price, so Opt' there never writes at its own level again (as in Disk-Revolve).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan, refuse_no_slots, set_against_bound
from memfit.chain.problem import Chain, find_exact_scale, scale_costs
from memfit.chain.strategies.even_spacing import plan_evenly_spaced
from memfit.chain.strategies.min_plus_rows import Row, convolve_row, find_split, find_split_of_known, level_rows
from memfit.chain.strategies.revolve import forwards_row, revolve_moves
from memfit.chain.strategies.unsorted_levels import is_affordable, plan_unsorted, relax
from memfit.core.errors import NoPlanFound

MAX_ADDITIONS = 5e11  # about two minutes on one core
MAX_TABLE_BYTES = 4 * 2**30
MAX_ORDERS = 24
FEW_ROWS = 4  # with more slots than this it pays to ask first whether their number matters at all


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTable:
    """Opt' of one level. `stored[m]` is the row for m slots (index 0 unused); an unbounded level has one row and `swept`."""

    level: int  # the chain's own number for this level
    slots: int
    write_cost: float
    read_cost: float
    below: Row  # Opt_{k-1}(., c_{k-1}): what remains without this level
    stored: tuple[Row, ...] = ()
    swept: Row | None = None  # unbounded: Opt_k(.) during the first sweep
    is_free: bool = False  # the first level, free to write and read: Revolve, no rows needed

    def best(self, slots: int) -> Row:
        """Opt_k(., slots)."""
        if self.swept is not None:
            return self.swept
        return self.below if slots == 0 else np.minimum(self.below, self.write_cost + self.stored[slots])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All levels of one problem, shallowest first; good for every length up to `num_steps`."""

    num_steps: int
    forward_cost: float
    levels: tuple[LevelTable, ...]
    optimum: Row  # the cost of every length with all slots free

    def moves(
        self, num_steps: int | None = None, *, offset: int = 0, top: int | None = None, slots: int | None = None, stored: bool = False
    ) -> Iterator[Move]:
        """Reverse `num_steps` forwards from x_offset, which is in the working buffer.

        `top` and `slots` limit the deepest level in use and its free slots; `stored` says that x_offset is there already
        (its slot counted in `slots`). An explicit stack: no length is too deep.
        """
        length = self.num_steps if num_steps is None else num_steps
        level = len(self.levels) - 1 if top is None else top
        free = slots if slots is not None else (self.levels[level].slots if level >= 0 else 0)
        stack: list[tuple[str, int, int, int, int]] = [("stored" if stored else "solve", level, length, free, offset)]
        while stack:
            task, k, length, free, base = stack.pop()
            if task == "read":
                yield Read(base, self.levels[k].level)
                stack.append(("stored", k, length, free, base))
            elif length == 0:
                if task == "stored":
                    yield Drop(base, self.levels[k].level)
                yield Back(base)
            elif self.levels[k].is_free:
                yield from revolve_moves(length, free, offset=base, level=self.levels[k].level, stored=task == "stored")
            elif task == "stored":
                yield from self._from_stored(stack, k, length, free, base)
            else:
                yield from self._from_buffer(stack, k, length, free, base)

    def _from_buffer(self, stack: list[tuple[str, int, int, int, int]], k: int, length: int, free: int, base: int) -> Iterator[Move]:
        table = self.levels[k]
        if free == 0 or table.best(free)[length] >= table.below[length]:
            stack.append(("solve", k - 1, length, self.levels[k - 1].slots, base))
            return
        yield Write(base, table.level)
        if table.swept is None:
            stack.append(("stored", k, length, free, base))
            return
        left = table.stored[0] + self.forward_cost * np.arange(1, len(table.below) + 1)
        jump = find_split_of_known(left, table.swept, length)
        yield Advance(base, base + jump)
        stack.append(("read", k, jump - 1, free, base))
        stack.append(("solve", k, length - jump, free, base + jump))

    def _from_stored(self, stack: list[tuple[str, int, int, int, int]], k: int, length: int, free: int, base: int) -> Iterator[Move]:
        table = self.levels[k]
        made = table.stored[0 if table.swept is not None else free]
        if made[length] >= table.below[length]:
            yield Drop(base, table.level)
            stack.append(("solve", k - 1, length, self.levels[k - 1].slots, base))
            return
        inner = table.below if table.swept is not None else table.best(free - 1)
        jump = find_split(inner, made, length, slope=self.forward_cost)
        yield Advance(base, base + jump)
        stack.append(("read", k, jump - 1, free, base))
        if table.swept is not None:
            stack.append(("solve", k - 1, length - jump, self.levels[k - 1].slots if k else 0, base + jump))
        else:
            stack.append(("solve", k, length - jump, free - 1, base + jump))


def make_tables(chain: Chain, order: tuple[int, ...] | None = None, *, max_additions: float = MAX_ADDITIONS) -> Tables:
    """The rows of every level, in `order` from the shallowest, which is by cost unless given. Raises NoPlanFound if that is too much."""
    order = order or sort_levels(chain) or tuple(range(len(chain.levels)))
    num, uf, ub = chain.num_steps, chain.forward_cost, chain.backward_cost
    below = np.full(num + 1, np.inf)
    below[0] = ub
    tables: list[LevelTable] = []
    for k in order:
        table = _level_table(chain, k, below, max_additions, first=not tables, last=k == order[-1])
        tables.append(table)
        if table.is_free:
            below = forwards_row(num, table.slots) * uf + np.arange(1, num + 2) * ub if uf else np.arange(1, num + 2) * ub
        else:
            below = table.best(table.slots)
        if chain.is_unbounded(k):
            break  # deeper levels cost no less and have nothing to add
    return Tables(num_steps=num, forward_cost=uf, levels=tuple(tables), optimum=below)


def _num_swept(table: LevelTable, left: Row, length: int) -> int:
    """How many states the first sweep leaves at an unbounded level: no more are ever held there at once."""
    num = 0
    assert table.swept is not None
    while length and table.swept[length] < table.below[length]:
        num += 1
        length -= find_split_of_known(left, table.swept, length)
    return num


def _level_table(chain: Chain, k: int, below: Row, max_additions: float, *, first: bool, last: bool) -> LevelTable:
    level, uf, ub = chain.levels[k], chain.forward_cost, chain.backward_cost
    slots, write, read = chain.capacity(k), level.write_cost, level.read_cost
    if first and write == read == 0:
        return LevelTable(level=k, slots=slots, write_cost=0.0, read_cost=0.0, below=below, is_free=True)
    if chain.is_unbounded(k) or (last and slots > FEW_ROWS):
        _check_size(2, chain.num_steps, max_additions)
        again = convolve_row(below, below, slope=uf, constant=read, first=ub)
        left = again + uf * np.arange(1, len(again) + 1)
        swept = convolve_row(left, below, slope=0.0, constant=write + read, first=ub)
        table = LevelTable(level=k, slots=slots, write_cost=write, read_cost=read, below=below, stored=(again,), swept=swept)
        if chain.is_unbounded(k) or _num_swept(table, left, chain.num_steps) <= slots:
            return table  # without a limit it would use no more slots than there are: the limit does not matter
    _check_size(slots, chain.num_steps, max_additions)
    rows = level_rows(below, slots, slope=uf, read=read, write=write, first=ub)
    return LevelTable(level=k, slots=len(rows), write_cost=write, read_cost=read, below=below, stored=(below, *rows))


def sort_levels(chain: Chain) -> tuple[int, ...] | None:
    """The levels that have slots, cheapest first; None when one is cheaper to write and dearer to read than another."""
    levels = chain.levels
    order = sorted((k for k in range(len(levels)) if levels[k].slots != 0), key=lambda k: (levels[k].write_cost, levels[k].read_cost))
    reads = [levels[k].read_cost for k in order]
    return tuple(order) if reads == sorted(reads) else None


def plan_hrevolve(chain: Chain) -> ChainPlan:
    """The optimal schedule of a chain over its storage levels."""
    begin = time.perf_counter()
    if chain.num_steps and not any(chain.capacity(k) for k in range(len(chain.levels))):
        return refuse_no_slots("h-revolve", chain)
    if sort_levels(chain) is None:
        return plan_unsorted(chain) if is_affordable(chain) else _best_order(chain, begin)
    scale = find_exact_scale(chain)
    try:
        tables = make_tables(scale_costs(chain, scale))
    except NoPlanFound:
        if chain.levels[0].write_cost or chain.levels[0].read_cost or not chain.capacity(0):
            raise
        return plan_evenly_spaced(chain)  # a plan with a bound rather than none
    cost = float(tables.optimum[chain.num_steps]) / scale
    assert math.isfinite(cost)
    reason = "H-Revolve's recurrence is optimal for levels that cost more the deeper they are."
    return set_against_bound("h-revolve", chain, cost, cost, tables.moves, begin=begin, reason=reason)


def _best_order(chain: Chain, begin: float) -> ChainPlan:
    """No order of the levels is right and the exact table is too large: the best order, and how far from optimal it may be."""
    scale = find_exact_scale(chain)
    usable = [k for k in range(len(chain.levels)) if chain.capacity(k)]
    orders = list(itertools.permutations(usable))[:MAX_ORDERS]
    tables = min((make_tables(scale_costs(chain, scale), order) for order in orders), key=lambda t: float(t.optimum[chain.num_steps]))
    bound = float(make_tables(scale_costs(relax(chain), scale)).optimum[chain.num_steps]) / scale
    cost = float(tables.optimum[chain.num_steps]) / scale
    reason = "No order sorts the levels by both costs; the bound takes every level to be as cheap as the cheapest at its depth or below."
    return set_against_bound("h-revolve (best order of levels)", chain, cost, bound, tables.moves, begin=begin, reason=reason)


def _check_size(num_rows: int, num_steps: int, max_additions: float) -> None:
    """Refuse, with the numbers, what would take hours or all memory; the caller can then choose a cheaper algorithm."""
    additions, table_bytes = num_rows * num_steps**2 / 2, num_rows * (num_steps + 1) * 8
    if additions > max_additions or table_bytes > MAX_TABLE_BYTES:
        raise NoPlanFound(
            f"{num_steps} steps with {num_rows} table rows take {additions:.1e} additions and {table_bytes:.1e} bytes, more than the "
            f"{max_additions:.0e} and {MAX_TABLE_BYTES:.0e} allowed: use fewer slots in the levels that cost, or periodic checkpointing."
        )
