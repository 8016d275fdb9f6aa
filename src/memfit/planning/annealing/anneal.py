"""Annealing over orders and recomputation at once: for graphs in which nearly every op can run at another time.

    state      any sequence with repeats (`timeline.py`)
    energy     its time + price x bytes over the limit, summed over positions
    moves      an execution runs elsewhere, alone (`weigh.py`) or with what stands in its way (`push.py`)
               a value is made again, with what that needs  |  a repeat is struck out (`rerun.py`)

             hot, bytes cheap  ─────────────────────────────>  cold, bytes dear
    over     ▇▆▇▆▅▆▅▄▅▄▃▄▃▂▃▂▁▂▁▁▁▁▁▁▁                        0: it fits
    time     ▁▂▁▂▃▂▃▄▃▄▅▄▅▄▅▄▄▄▃▄▃▃▃▃▃                        as little as was found on the way

An order that is best by itself is not the best to recompute in, and what to recompute depends on the order: a random layered graph of 250 ops
for which orders were found first and recomputation second got no plan in half a minute at 60 % of its peak, and gets one of 7 to 12 points so.
Where it ends is a matter of luck, so there are many runs (`crowd.py`).
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.annealing.group_moves import CROWD, gather, push, push_back
from memfit.planning.annealing.move_cost import clear, do_move, freed, weigh_move, weigh_strike
from memfit.planning.annealing.move_table import (
    BAD,
    BASE,
    COUNT,
    FORM,
    LENGTH,
    LIMIT,
    ORDER,
    OVER,
    POS,
    STATE,
    TARGET,
    TIME,
    USAGE,
    Table,
    sequence_of,
    timeline,
)
from memfit.planning.annealing.recompute_moves import MOST, WHERE_IT_FITS, last_before, remake, strike, unmake, unstrike
from memfit.planning.model.reduce import Arrays, Floats, Ints

_PUSHES, _MOVES, _REMAKES = 0.1, 0.85, 0.95
"""Shares of the kinds of change: up to here executions move with what stands in their way, up to here alone, up to here values are made again,
from there on repeats are struck out."""
_PUSH_REACH = 12.0
"""How far, in positions, they are pushed on average."""
_NEAR = 6.0
"""How far, in positions, from where it is too high a move begins."""
_STOPPED = 1023
"""Every so many changes the run looks up whether it is to stop."""
_GROWTH, _EVENTS = 4, 12
"""How many times longer a sequence may become, and how many times as many events a storage may get."""


@kernel
def first_place(a: Arrays, st: Table, ev: Ints, x: int) -> int:
    """The first position at which execution x finds its inputs made."""
    f, low = st[FORM, x], 0
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        for i in range(st[BASE, s], st[BASE, s] + (0 if a.source[s] else st[COUNT, s])):
            if ev[i] & 1:
                low = max(low, st[POS, ev[i] >> 1] + 1)
                break
    return low


@kernel
def last_place(a: Arrays, st: Table, ev: Ints, x: int) -> int:
    """The last position at which execution x is in time for readers that have no other."""
    f, high = st[FORM, x], int(st[STATE, LENGTH]) - 1
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        i = st[BASE, a.out_idx[k]]
        if ev[i] == 2 * x + 1 and st[COUNT, a.out_idx[k]] > 1 and not ev[i + 1] & 1:
            high = min(high, st[POS, ev[i + 1] >> 1] - 1)
    return high


@kernel
def find_height(st: Table) -> int:
    """A position over the limit, the one from before if it still is; any position where none is found at once."""
    n = int(st[STATE, LENGTH])
    target = int(st[STATE, TARGET])
    for _ in range(16):
        if target < n and st[USAGE, target] > st[STATE, LIMIT]:
            break
        target = np.random.randint(0, n)
    st[STATE, TARGET] = np.random.randint(0, n) if np.random.random() < 0.1 else target
    return min(target, n - 1)


@kernel
def some_place(st: Table) -> int:
    """Any position, half of the time one near a height."""
    n = int(st[STATE, LENGTH])
    if st[STATE, OVER] > 0 and np.random.random() < 0.5:
        return min(max(find_height(st) + int(_NEAR * np.random.standard_normal()), 0), n - 1)
    return np.random.randint(0, n)


@kernel
def accepted(st: Table, over: int, time: int, price: float, slack: float) -> bool:
    return bool(st[STATE, BAD] == 0 and st[STATE, TIME] - time + price * (st[STATE, OVER] - over) <= slack)


@kernel
def move_if(a: Arrays, st: Table, ev: Ints, p: int, q: int, price: float, slack: float) -> None:
    over = weigh_move(a, st, ev, p, q)
    if price * over <= slack:
        do_move(a, st, ev, p, q, over)
    else:
        clear(st)


@kernel
def try_move(a: Arrays, st: Table, ev: Ints, price: float, slack: float) -> None:
    """An execution runs somewhere else where it may."""
    p = some_place(st)
    x = st[ORDER, p]
    if a.seeded[st[FORM, x]] or not a.replayable[st[FORM, x]]:
        return
    low, high = first_place(a, st, ev, x), last_place(a, st, ev, x)
    if np.random.random() < 0.5:
        reach = 1 + int(np.random.exponential(8.0))
        low, high = max(low, p - reach), min(high, p + reach)
    if low >= high:
        return
    q = np.random.randint(low, high + 1)
    if q == p:
        return
    move_if(a, st, ev, p, q, price, slack)


@kernel
def try_push(a: Arrays, st: Table, ev: Ints, price: float, slack: float, log: Ints) -> None:
    """An execution runs somewhere else, and what stands in its way goes with it."""
    n, over, p = st[STATE, LENGTH], st[STATE, OVER], some_place(st)
    reach = 1 + int(np.random.exponential(_PUSH_REACH))
    q = max(p - reach, 0) if np.random.random() < 0.5 else min(p + reach, n - 1)
    if q == p:
        return
    group = log[2 * CROWD :]
    count = gather(a, st, ev, st[ORDER, p], q, group)
    if count == 1:
        move_if(a, st, ev, p, q, price, slack)
    elif count > 1:
        last, to = push(a, st, ev, p, q, count, group, log)
        more = weigh_move(a, st, ev, last, to)
        if price * (st[STATE, OVER] + more - over) <= slack:
            do_move(a, st, ev, last, to, more)
        else:
            clear(st)
            push_back(a, st, ev, count - 1, log)


@kernel
def try_remake(a: Arrays, st: Table, ev: Ints, price: float, slack: float, log: Ints) -> None:
    """A value is made again for one of its readers, half of the time one that waits across a height."""
    n, over, time = st[STATE, LENGTH], st[STATE, OVER], st[STATE, TIME]
    p, height = np.random.randint(0, n), n
    if over > 0 and np.random.random() < 0.5:
        target = find_height(st)
        if target < n - 1:
            p, height = np.random.randint(target + 1, n), target
    f = st[FORM, st[ORDER, p]]
    fan = a.in_ptr[f + 1] - a.in_ptr[f]
    if fan == 0:
        return
    s = a.in_idx[a.in_ptr[f] + np.random.randint(0, fan)]
    event = last_before(st, ev, s, p)
    if event < 0:
        return
    back = st[POS, ev[event] >> 1]
    if p - back < 3 or back >= height:
        return
    q = p if np.random.random() < 0.6 else np.random.randint(back + 1, p + 1)
    way = np.random.random()
    chance = WHERE_IT_FITS if way < 0.3 else 1.0 if way < 0.5 else np.random.random()
    count = remake(a, st, ev, s, q, chance, slack + price * freed(st, back + 1, q - 1, a.size[s]), log)
    if count and not accepted(st, over, time, price, slack):
        unmake(a, st, ev, q, count)


@kernel
def try_strike(a: Arrays, st: Table, ev: Ints, price: float, slack: float, log: Ints) -> None:
    """A run of something that is made more than once goes: the next such one from a random position on."""
    n, over, time = st[STATE, LENGTH], st[STATE, OVER], st[STATE, TIME]
    p = np.random.randint(0, n)
    for _ in range(n):
        f = st[FORM, st[ORDER, p]]
        made = 0
        for k in range(a.out_ptr[f], min(a.out_ptr[f] + 1, a.out_ptr[f + 1])):
            s = a.out_idx[k]
            for i in range(st[BASE, s], st[BASE, s] + st[COUNT, s]):
                made += ev[i] & 1
        if made > 1 and a.replayable[f] and not a.seeded[f]:
            if price * weigh_strike(a, st, ev, p) - a.time[f] > slack:
                return
            count = strike(a, st, ev, p, log)
            if not accepted(st, over, time, price, slack):
                unstrike(a, st, ev, count, log)
            return
        p = p + 1 if p + 1 < n else 0


@kernel
def anneal(a: Arrays, start: Ints, limit: int, toll: int, moves: int, heat: Floats, seed: int, stop: Ints) -> Ints:
    """The sequence with least over the limit, then least time, met in `moves` changes from `start`.

    `heat` is (warmth at first, in the end; price of a byte at first, in the end), in units of time; each position over the limit counts as
    `toll` bytes more. `stop[0]` other than 0 ends the run.
    """
    np.random.seed(seed)
    st, ev = timeline(a, start, limit, _GROWTH * len(start) + 64, _EVENTS, toll)
    best, best_over, best_time = sequence_of(st), st[STATE, OVER], st[STATE, TIME]
    log = np.empty(2 * MOST, np.int64)
    warmth, price = heat[0], heat[2]
    cooling, rising = (heat[1] / heat[0]) ** (1.0 / moves), (heat[3] / heat[2]) ** (1.0 / moves)
    for number in range(moves):
        warmth *= cooling
        price *= rising
        if number & _STOPPED == _STOPPED and stop[0]:
            break
        slack = -warmth * np.log(1.0 - np.random.random())
        kind = np.random.random()
        if kind < _PUSHES:
            try_push(a, st, ev, price, slack, log)
        elif kind < _MOVES:
            try_move(a, st, ev, price, slack)
        elif kind < _REMAKES:
            try_remake(a, st, ev, price, slack, log)
        else:
            try_strike(a, st, ev, price, slack, log)
        if st[STATE, OVER] < best_over or (st[STATE, OVER] == best_over and st[STATE, TIME] < best_time):
            best, best_over, best_time = sequence_of(st), st[STATE, OVER], st[STATE, TIME]
    return best
