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
Where it ends is a matter of luck, so there are many runs, side by side on two threads: first from the step itself, then from the best ones.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from os import cpu_count
from time import perf_counter

import numpy as np

from memfit.planning.kernel import kernel
from memfit.planning.mend import excess
from memfit.planning.model import Arrays, Floats, Ints
from memfit.planning.polish import polish
from memfit.planning.push import CROWD, gather, push, push_back
from memfit.planning.replay import measure
from memfit.planning.rerun import MOST, WHERE_IT_FITS, last_before, remake, strike, unmake, unstrike
from memfit.planning.search import Search
from memfit.planning.timeline import (
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
from memfit.planning.weigh import clear, do_move, freed, weigh_move, weigh_strike

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


_FIRST_SHARE = 0.55
"""Share of the time for runs from the step itself; in the rest runs set out from the best of those."""
_LENGTHS = (1, 1, 2)
"""How long runs are, as multiples of the shortest: short ones find most by their number, long ones what short ones never find."""
_RUNS = 6
"""The shortest run is so that this many of them fill the time of one thread."""
_HOTS = (3.0, 6.0, 2.0)
"""How hot runs begin, in times of an average op: the tighter the budget the hotter it must be, and nobody knows beforehand how tight it is."""
_ELITE = 3
_TRIAL_MOVES = 20_000
_COLD, _DEAR = 0.03, 300.0
"""In the end: warmth, and the price of an average storage too much, in times of an average op. (Against 0.1 and 60 in 30 s: random layered 100 and
200 of seed 31337 at 60 % 8.0 and 9.4 points for 11.6 and none, 200 of seed 20611 at 50 % 0.8 for 1.4, `layered_n250` at 60 % 7.5 for 6.8.)"""
_OVER_WARMTH = 3.0
"""At first: of how many average storages too much one makes as little as of the warmth in time."""
_TOLL = 0.005
"""What a position over the limit counts extra, as a part of the limit: else a hundred bytes too much would be cheaper than any way to avoid them."""
_MANY_FORMS, _MANY_RUNS, _MANY_HOTS, _MANY_COLD, _MANY_DEAR = 3000, 1.5, (0.3, 1.0), 0.1, 60.0
"""Large graphs: from how many forms on there are so few runs, from an order that holds less, how hot they begin and how they end. On 10,000 random ops at
60 % of the peak a run of 25 s ends with a plan of 0.2 points, where twelve short ones end with none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    over: int
    time: int
    sequence: Ints


@dataclass(slots=True)
class _Crowd:
    """Where runs set out from, and what they came to, the best first."""

    search: Search
    start: Ints
    random: np.random.Generator
    stop: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    found: list[_Found] = field(default_factory=list)
    number: int = 0

    def arguments(self, moves: int, again: bool) -> tuple[Ints, int, int, Floats, int]:
        """Of the next run, from the step itself or (`again`, then less hot and with bytes dear from the beginning) from something found."""
        hots, cold, dear = (_MANY_HOTS, _MANY_COLD, _MANY_DEAR) if _is_large(self.search) else (_HOTS, _COLD, _DEAR)
        a, random, hot = self.search.problem.model.arrays, self.random, hots[self.number % len(hots)]
        op_ns = max(float(a.time[self.start].mean()), 1.0)
        byte_ns = op_ns / max(float(a.size[a.size > 0].mean()), 1.0)
        start, cheap = self.start, hot / _OVER_WARMTH
        self.number += 1
        if again and self.found:
            start = self.found[int(random.integers(min(_ELITE, len(self.found))))].sequence
            hot, cheap = float(np.exp(random.uniform(-1.0, 1.0))), float(np.exp(random.uniform(1.0, 3.0)))
        heat = np.array([hot * op_ns, cold * op_ns, cheap * byte_ns, dear * byte_ns])
        return start, int(_TOLL * self.search.problem.limit_bytes), moves, heat, int(random.integers(2**31))

    def run(self, start: Ints, toll: int, moves: int, heat: Floats, seed: int) -> _Found:
        a, limit = self.search.problem.model.arrays, self.search.problem.limit_bytes
        sequence = anneal(a, start, limit, toll, moves, heat, seed, self.stop)
        usage = np.empty(len(sequence), np.int64)
        measure(a, sequence, usage)
        over = int(excess(usage, len(sequence), limit))
        sequence = polish(a, sequence, limit) if over == 0 else sequence
        return _Found(over=over, time=int(a.time[sequence].sum()), sequence=sequence)

    def take(self, found: _Found) -> None:
        """Remember it, and offer it as a plan."""
        if all((found.over, found.time) != (known.over, known.time) for known in self.found):
            self.found = sorted((*self.found, found), key=lambda item: (item.over, item.time))
        self.search.offer(found.sequence, "annealing")


def _is_large(search: Search) -> bool:
    return search.problem.model.num_forms >= _MANY_FORMS


def explore_annealed(search: Search, *, seconds: float, seed: int = 0) -> None:
    """Runs of annealing, as many at once as there are cores (two at most), until the time is up or the plan is good enough."""
    problem = search.problem
    start, takes = search.siblings.plain[np.array(problem.model.agenda, np.int64)], problem.model.takes
    if search.done or search.good_enough or not len(start) or any(takes[f] for f in start):
        return  # what overwrites is not moved about
    if _is_large(search) and search.rank is not None:
        start = start[np.argsort(search.rank[start], kind="stable")]
    began, seconds = problem.seconds, min(seconds, problem.seconds_left)
    crowd = _Crowd(search, start, np.random.default_rng(seed))
    if search.best is not None:
        crowd.found.append(_Found(over=0, time=search.best_time_ns, sequence=search.siblings.plain[search.best]))
    crowd.run(*crowd.arguments(1, False))  # loads it from disk
    clock = perf_counter()
    crowd.take(crowd.run(*crowd.arguments(_TRIAL_MOVES, False)))
    runs = _MANY_RUNS if _is_large(search) else _RUNS
    shortest = max(int(_TRIAL_MOVES * seconds / runs / max(perf_counter() - clock, 1e-3)), 1000)
    running: set[Future[_Found]] = set()
    workers = min(2, cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        try:
            while problem.seconds - began < seconds and not search.done and not search.good_enough:
                while len(running) < workers:
                    again = problem.seconds - began > _FIRST_SHARE * seconds and (search.best is not None or crowd.number % 2 == 0)
                    length = 1 if _is_large(search) else _LENGTHS[crowd.number % len(_LENGTHS)]
                    moves = shortest // 2 if again else shortest * length
                    running.add(pool.submit(crowd.run, *crowd.arguments(moves, again)))
                left = seconds - (problem.seconds - began)
                done, running = wait(running, timeout=max(min(left, 0.5), 0.0), return_when=FIRST_COMPLETED)
                for future in done:
                    crowd.take(future.result())
        finally:
            crowd.stop[0] = 1
    for future in running:
        crowd.take(future.result())
