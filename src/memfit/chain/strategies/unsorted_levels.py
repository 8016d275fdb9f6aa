"""Levels that no order sorts: one is cheaper to write, another cheaper to read.

    level 0   write 5, read 0     good for a state read often
    level 1   write 0, read 3     good for a state read once

H-Revolve nests levels by depth; here any level may sit inside any other, so the state of the table is the vector m of
free slots in all levels:

    Core_k(l, m) = min_j [ j uf + Opt(l-j, m - e_k) + r_k + Opt'_k(j-1, m) ]     x_0 at level k, read again after the jump
    Opt(l, m)    = min_k ( w_k + Core_k(l, m) )
    Opt'_k(l, m) = min( Core_k(l, m), Opt(l, m) )                                or x_0 is moved to another level

O(l^2 K prod(c_k + 1)). Where that is too much, `hrevolve.py` takes the best order of the levels, with the bound of a chain in
which every level is as cheap as the cheapest at its depth or below (`relax`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan, set_against_bound
from memfit.chain.problem import Chain, find_exact_scale, scale_costs
from memfit.chain.strategies.exhaustive import search_all
from memfit.chain.strategies.min_plus_rows import Row

MAX_WORK = 1.5e10  # additions, with each row's overhead counted as 2,000 of them: about half a minute
SEARCH_UP_TO = 6  # steps
_NAME = "h-revolve (crossed levels)"
Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    chain: Chain
    best: dict[Slots, Row]  # Opt(., m)
    stored: dict[tuple[int, Slots], Row]  # Opt'_k(., m)

    def moves(self) -> Iterator[Move]:
        full = _capacities(self.chain)
        stack: list[tuple[str, int, int, Slots, int]] = [("solve", -1, self.chain.num_steps, full, 0)]
        while stack:
            task, k, length, free, base = stack.pop()
            if task == "read":
                yield Read(base, k)
                stack.append(("stored", k, length, free, base))
            elif length == 0:
                if task == "stored":
                    yield Drop(base, k)
                yield Back(base)
            elif task == "solve":
                level = self._level_to_write(length, free)
                yield Write(base, level)
                yield from self._jump(stack, level, length, free, base)
            elif self.stored[k, free][length] >= self.best[free][length]:
                yield Drop(base, k)
                stack.append(("solve", -1, length, free, base))
            else:
                yield from self._jump(stack, k, length, free, base)

    def _level_to_write(self, length: int, free: Slots) -> int:
        usable = [k for k in range(len(free)) if free[k]]
        return min(usable, key=lambda k: self.chain.levels[k].write_cost + self._candidates(k, length, free).min())

    def _candidates(self, k: int, length: int, free: Slots) -> Row:
        uf, read = self.chain.forward_cost, self.chain.levels[k].read_cost
        inner, made = self.best[_take_slot(free, k)], self.stored[k, free]
        result: Row = made[:length] + uf * np.arange(1, length + 1) + read + inner[:length][::-1]
        return result

    def _jump(self, stack: list[tuple[str, int, int, Slots, int]], k: int, length: int, free: Slots, base: int) -> Iterator[Move]:
        jump = int(self._candidates(k, length, free).argmin()) + 1
        yield Advance(base, base + jump)
        stack.append(("read", k, jump - 1, free, base))
        stack.append(("solve", -1, length - jump, _take_slot(free, k), base + jump))


def _capacities(chain: Chain) -> Slots:
    return tuple(chain.capacity(k) for k in range(len(chain.levels)))


def _take_slot(free: Slots, k: int) -> Slots:
    return (*free[:k], free[k] - 1, *free[k + 1 :])


def make_slot_tables(chain: Chain) -> SlotTables:
    num, uf, ub = chain.num_steps, chain.forward_cost, chain.backward_cost
    best: dict[Slots, Row] = {}
    stored: dict[tuple[int, Slots], Row] = {}
    for free in itertools.product(*(range(c + 1) for c in _capacities(chain))):
        usable = [k for k in range(len(free)) if free[k]]
        row = np.full(num + 1, np.inf)
        row[0] = ub
        best[free] = row
        if not usable:
            continue
        inner = np.stack([best[_take_slot(free, k)][::-1] for k in usable])
        writes = np.array([chain.levels[k].write_cost for k in usable])
        reads = np.array([chain.levels[k].read_cost for k in usable])
        made, shifted = np.full((len(usable), num + 1), ub), np.empty((len(usable), num + 1))
        shifted[:, 0] = ub + uf + reads
        for length in range(1, num + 1):
            core = (shifted[:, :length] + inner[:, num - length + 1 :]).min(axis=1)
            row[length] = (writes + core).min()
            made[:, length] = np.minimum(core, row[length])
            shifted[:, length] = made[:, length] + (length + 1) * uf + reads
        stored.update({(k, free): made[i] for i, k in enumerate(usable)})
    return SlotTables(chain=chain, best=best, stored=stored)


def is_affordable(chain: Chain) -> bool:
    """Whether the table over all vectors of slots takes seconds rather than hours."""
    entries = math.prod(c + 1 for c in _capacities(chain)) * len(chain.levels)
    return entries * chain.num_steps * (chain.num_steps + 2_000) <= MAX_WORK


def plan_unsorted(chain: Chain) -> ChainPlan:
    """The best nested schedule when no order sorts the levels; `is_affordable` says when that is affordable.

    That no schedule is cheaper is proven by exhaustive search for short chains, else only if the relaxed chain's bound is met.
    """
    begin = time.perf_counter()
    scale = find_exact_scale(chain)
    if chain.num_steps <= SEARCH_UP_TO and (found := search_all(scale_costs(chain, scale))) is not None:
        total, moves = found
        reason = "Exhaustive search over every schedule of these few steps."
        return set_against_bound(_NAME, chain, total / scale, total / scale, lambda: iter(moves), begin=begin, reason=reason)
    tables = make_slot_tables(scale_costs(chain, scale))
    cost = float(tables.best[_capacities(chain)][chain.num_steps]) / scale
    reason = (
        "The best of all nestings of the levels; no order sorts them by both costs, so the optimality proof of H-Revolve does not apply."
    )
    return set_against_bound(_NAME, chain, cost, bound_by_relaxing(chain), tables.moves, begin=begin, reason=reason)


def bound_by_relaxing(chain: Chain) -> float:
    """The optimum of `relax`: its levels are sorted, so the table over slot vectors gives H-Revolve's optimum there."""
    scale = find_exact_scale(chain)
    tables = make_slot_tables(scale_costs(relax(chain), scale))
    return float(tables.best[_capacities(relax(chain))][chain.num_steps]) / scale


def relax(chain: Chain) -> Chain:
    """Every level made as cheap as the cheapest at its depth or below: sorted, and never dearer than the real chain."""
    levels = tuple(sorted(chain.levels, key=lambda x: (x.write_cost, x.read_cost)))
    return replace(
        chain,
        levels=tuple(
            replace(x, write_cost=min(y.write_cost for y in levels[k:]), read_cost=min(y.read_cost for y in levels[k:]))
            for k, x in enumerate(levels)
        ),
    )
