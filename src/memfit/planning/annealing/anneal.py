"""Annealing over orders and recomputation at once: for graphs in which nearly every op can run at another time.

    state      any sequence of executions, repeats included (`move_table.py`)
    energy     its time + price x bytes over the limit, summed over positions
    moves      one execution changes place, alone (`move_cost.py`) or with those in its way (`group_moves.py`)
               a value is recomputed, with what that needs  |  a repeat is deleted (`recompute_moves.py`)

             hot, bytes cheap  ─────────────────────────────>  cold, bytes dear
    over     ▇▆▇▆▅▆▅▄▅▄▃▄▃▂▃▂▁▂▁▁▁▁▁▁▁                        0: it fits
    time     ▁▂▁▂▃▂▃▄▃▄▅▄▅▄▅▄▄▄▃▄▃▃▃▃▃                        as little as was found on the way

Order and recomputation are searched together, because each depends on the other: the best order without recomputation is
seldom the best one to recompute in. Where one run ends is a matter of luck, so `runs.py` starts many.
"""

from __future__ import annotations

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.annealing.group_moves import MAX_GROUP, gather, push, push_back
from memfit.planning.annealing.move_cost import clear_notes, do_move, measure_relief, weigh_deletion, weigh_move
from memfit.planning.annealing.move_table import ROW, STATE, Table, make_table, sequence_of
from memfit.planning.annealing.recompute_moves import MOST, WHERE_IT_FITS, delete, last_event_before, remake, undelete, unmake
from memfit.planning.model.reduce import Arrays, Floats, Ints

_PUSHES, _MOVES, _REMAKES = 0.1, 0.85, 0.95
"""Which change is tried, by a random number from 0 to 1: below the first a group moves, below the second one execution moves, below the
third a value is recomputed, and above it a repeat is deleted."""
_PUSH_REACH = 12.0
"""How far a group moves on average, in positions."""
_NEAR = 6.0
"""How far from a position over the limit a move begins, on average, in positions."""
_STOPPED = 1023
"""The run checks whether to stop once in this many moves, plus one."""
_GROWTH, _EVENTS = 4, 12
"""How many times longer a sequence may become, and how many times as many events a storage may get."""


@kernel
def first_place(a: Arrays, st: Table, ev: Ints, x: int) -> int:
    """The first position at which execution x finds all its inputs."""
    f, low = st[ROW.form, x], 0
    for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
        s = a.in_idx[k]
        for i in range(st[ROW.base, s], st[ROW.base, s] + (0 if a.source[s] else st[ROW.num_events, s])):
            if ev[i] & 1:
                low = max(low, st[ROW.pos, ev[i] >> 1] + 1)
                break
    return low


@kernel
def last_place(a: Arrays, st: Table, ev: Ints, x: int) -> int:
    """The last position at which execution x still runs before readers that use its value."""
    f, high = st[ROW.form, x], int(st[ROW.state, STATE.length]) - 1
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        i = st[ROW.base, a.out_idx[k]]
        if ev[i] == 2 * x + 1 and st[ROW.num_events, a.out_idx[k]] > 1 and not ev[i + 1] & 1:
            high = min(high, st[ROW.pos, ev[i + 1] >> 1] - 1)
    return high


@kernel
def find_height(st: Table) -> int:
    """A position over the limit: the last one used if it still is, else one of a few random tries, else any position."""
    n = int(st[ROW.state, STATE.length])
    target = int(st[ROW.state, STATE.target])
    for _ in range(16):
        if target < n and st[ROW.usage, target] > st[ROW.state, STATE.limit]:
            break
        target = np.random.randint(0, n)
    st[ROW.state, STATE.target] = np.random.randint(0, n) if np.random.random() < 0.1 else target
    return min(target, n - 1)


@kernel
def pick_place(st: Table) -> int:
    """A random position; half of the time one near a position over the limit."""
    n = int(st[ROW.state, STATE.length])
    if st[ROW.state, STATE.over] > 0 and np.random.random() < 0.5:
        return min(max(find_height(st) + int(_NEAR * np.random.standard_normal()), 0), n - 1)
    return np.random.randint(0, n)


@kernel
def is_accepted(st: Table, over: int, time: int, price: float, slack: float) -> bool:
    """The Metropolis test: the energy grows by at most `slack`, and nothing is read before it is made."""
    return bool(st[ROW.state, STATE.bad] == 0 and st[ROW.state, STATE.time] - time + price * (st[ROW.state, STATE.over] - over) <= slack)


@kernel
def move_if(a: Arrays, st: Table, ev: Ints, p: int, q: int, price: float, slack: float) -> None:
    """Move the execution at p to q if the energy grows by at most `slack`."""
    over = weigh_move(a, st, ev, p, q)
    if price * over <= slack:
        do_move(a, st, ev, p, q, over)
    else:
        clear_notes(st)


@kernel
def try_move(a: Arrays, st: Table, ev: Ints, price: float, slack: float) -> None:
    """Move one execution to a random place among those its inputs and readers allow."""
    p = pick_place(st)
    x = st[ROW.order, p]
    if a.seeded[st[ROW.form, x]] or not a.replayable[st[ROW.form, x]]:
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
    """Move one execution, and with it those that stand in its way."""
    n, over, p = st[ROW.state, STATE.length], st[ROW.state, STATE.over], pick_place(st)
    reach = 1 + int(np.random.exponential(_PUSH_REACH))
    q = max(p - reach, 0) if np.random.random() < 0.5 else min(p + reach, n - 1)
    if q == p:
        return
    group = log[2 * MAX_GROUP :]
    count = gather(a, st, ev, st[ROW.order, p], q, group)
    if count == 1:
        move_if(a, st, ev, p, q, price, slack)
    elif count > 1:
        last, to = push(a, st, ev, p, q, count, group, log)
        more = weigh_move(a, st, ev, last, to)
        if price * (st[ROW.state, STATE.over] + more - over) <= slack:
            do_move(a, st, ev, last, to, more)
        else:
            clear_notes(st)
            push_back(a, st, ev, count - 1, log)


@kernel
def try_remake(a: Arrays, st: Table, ev: Ints, price: float, slack: float, log: Ints) -> None:
    """Recompute a value for one of its readers; half of the time one that is kept across a position over the limit."""
    n, over, time = st[ROW.state, STATE.length], st[ROW.state, STATE.over], st[ROW.state, STATE.time]
    p, height = np.random.randint(0, n), n
    if over > 0 and np.random.random() < 0.5:
        target = find_height(st)
        if target < n - 1:
            p, height = np.random.randint(target + 1, n), target
    f = st[ROW.form, st[ROW.order, p]]
    fan = a.in_ptr[f + 1] - a.in_ptr[f]
    if fan == 0:
        return
    s = a.in_idx[a.in_ptr[f] + np.random.randint(0, fan)]
    event = last_event_before(st, ev, s, p)
    if event < 0:
        return
    back = st[ROW.pos, ev[event] >> 1]
    if p - back < 3 or back >= height:
        return
    q = p if np.random.random() < 0.6 else np.random.randint(back + 1, p + 1)
    way = np.random.random()
    chance = WHERE_IT_FITS if way < 0.3 else 1.0 if way < 0.5 else np.random.random()
    count = remake(a, st, ev, s, q, chance, slack + price * measure_relief(st, back + 1, q - 1, a.size[s]), log)
    if count and not is_accepted(st, over, time, price, slack):
        unmake(a, st, ev, q, count)


@kernel
def try_delete(a: Arrays, st: Table, ev: Ints, price: float, slack: float, log: Ints) -> None:
    """Delete an execution of something that is made more than once: the next one after a random position."""
    n, over, time = st[ROW.state, STATE.length], st[ROW.state, STATE.over], st[ROW.state, STATE.time]
    p = np.random.randint(0, n)
    for _ in range(n):
        f = st[ROW.form, st[ROW.order, p]]
        made = 0
        for k in range(a.out_ptr[f], min(a.out_ptr[f] + 1, a.out_ptr[f + 1])):
            s = a.out_idx[k]
            for i in range(st[ROW.base, s], st[ROW.base, s] + st[ROW.num_events, s]):
                made += ev[i] & 1
        if made > 1 and a.replayable[f] and not a.seeded[f]:
            if price * weigh_deletion(a, st, ev, p) - a.time[f] > slack:
                return
            count = delete(a, st, ev, p, log)
            if not is_accepted(st, over, time, price, slack):
                undelete(a, st, ev, count, log)
            return
        p = p + 1 if p + 1 < n else 0


@kernel
def anneal(a: Arrays, start: Ints, limit: int, toll: int, moves: int, heat: Floats, seed: int, stop: Ints) -> Ints:
    """The sequence with least over the limit, then least time, met in `moves` changes from `start`.

    `heat` is (temperature at first and in the end, price of a byte at first and in the end), in units of time. Each position over the
    limit counts as `toll` bytes more. `stop[0]` other than 0 ends the run.
    """
    np.random.seed(seed)
    st, ev = make_table(a, start, limit, _GROWTH * len(start) + 64, _EVENTS, toll)
    best, best_over, best_time = sequence_of(st), st[ROW.state, STATE.over], st[ROW.state, STATE.time]
    log = np.empty(2 * MOST, np.int64)
    temperature, price = heat[0], heat[2]
    cooling, rising = (heat[1] / heat[0]) ** (1.0 / moves), (heat[3] / heat[2]) ** (1.0 / moves)
    for number in range(moves):
        temperature *= cooling
        price *= rising
        if number & _STOPPED == _STOPPED and stop[0]:
            break
        slack = -temperature * np.log(1.0 - np.random.random())
        kind = np.random.random()
        if kind < _PUSHES:
            try_push(a, st, ev, price, slack, log)
        elif kind < _MOVES:
            try_move(a, st, ev, price, slack)
        elif kind < _REMAKES:
            try_remake(a, st, ev, price, slack, log)
        else:
            try_delete(a, st, ev, price, slack, log)
        if st[ROW.state, STATE.over] < best_over or (st[ROW.state, STATE.over] == best_over and st[ROW.state, STATE.time] < best_time):
            best, best_over, best_time = sequence_of(st), st[ROW.state, STATE.over], st[ROW.state, STATE.time]
    return best
