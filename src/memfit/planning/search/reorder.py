"""Local search over orders: ops are moved about, as far as what they wait for allows, until the step fits or time is up.

    usage    ▂▅█▇▅▂      an op at the height moves to before or after it: only the positions between are measured again
             ▂▅▇▆▆▂      kept if fewer bytes are over the limit, or hardly more while the search is young

Without recomputation lifetimes follow from positions alone, so a move costs as much as the positions it crosses, not
as the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.model.precedence import Precedence, find_precedence, movable_fraction
from memfit.planning.model.reduce import Arrays, Ints
from memfit.planning.search.state import Search
from memfit.planning.settings import ReorderSettings

_NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder:
    """The step's own ops in another order: where that fits nothing is faster, and where it holds less other seeds begin with it.

    `first`: before anything else, for graphs in which most ops can move.
    """

    name: str = "reorder"
    first: bool = False

    def applies(self, search: Search) -> bool:
        if not search.may_reorder or search.settled or search.good_enough or search.rank is not None or not search.problem.model.agenda:
            return False
        if self.first:
            graph, least = search.problem.model, search.settings.reorder.movable_share
            return search.is_large or movable_fraction(find_precedence(graph)) > least
        return search.bound_ns <= search.floor.time_ns or search.best is None  # no cut says that anything must run twice

    def run(self, search: Search, seconds: float) -> None:
        problem, numbers = search.problem, search.settings.reorder
        agenda = np.array(problem.model.agenda, np.int64)
        peak, _ = peak_and_time(problem.model.arrays, agenda)
        order = lower_peak(find_precedence(problem.model), agenda, problem.limit_bytes, seconds=seconds, numbers=numbers)
        search.consider(order, "another order")
        lower, _ = peak_and_time(problem.model.arrays, order)
        if lower != INVALID and lower < peak - numbers.helps_share * (peak - search.floor.bytes):
            search.rank = np.zeros(problem.model.num_forms, np.int64)
            search.rank[order] = np.arange(len(order))


_NUMBERS = ReorderSettings()


def lower_peak(
    graph: Precedence, order: Ints, limit_bytes: int, *, seconds: float, seed: int = 0, numbers: ReorderSettings = _NUMBERS
) -> Ints:
    """The best order reached from `order` in about `seconds`; at once when one fits.

    A limit far below the peak is approached in steps: where nearly every position is over the limit, a move at the highest one counts for little.
    """
    best = current = order
    peak, _ = peak_and_time(graph.arrays, order)
    target, best_over = max(limit_bytes, int(numbers.limit_step * peak)), _NEVER
    began = stepped = perf_counter()
    moves = max(200, 4_000_000 // max(len(order), 1))
    for number in range(1 << 20):
        now = perf_counter()
        if now - began >= seconds or not len(order):
            break
        temperature = numbers.temperature * (1 - (now - stepped) / max(began + seconds - stepped, 1e-9)) * (number % 2)
        current, over = move_ops(
            graph.arrays, current, target, *graph.before, *graph.after, graph.num_readers, moves, temperature, seed + number
        )
        if over < best_over:
            best, best_over = current, over
        if over == 0 and target <= limit_bytes:
            break
        if over == 0:
            target, best_over, stepped = max(limit_bytes, int(numbers.limit_step * target)), _NEVER, now
        elif over > numbers.lost * best_over:
            current = best
    return best


@kernel
def replay_range(a: Arrays, order: Ints, low: int, high: int, held: int, last: Ints, num_readers: Ints, limit: int, usage: Ints) -> int:
    """Fill `usage` from `low` to `high`, given what is held before it; returns the bytes over the limit there."""
    for p in range(low, high + 1):
        f = order[p]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if last[s] <= high:  # no reader after `high`: the last one up to it frees
                last[s] = p
    over = 0
    for p in range(low, high + 1):
        f = order[p]
        now = held + a.workspace[f]
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            s = a.out_idx[k]
            now += a.size[s]
            if num_readers[s] > 0 or a.pinned[s]:
                held += a.size[s]
        usage[p] = now
        if now > limit:
            over += now - limit
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            s = a.take_new[k]
            if num_readers[s] > 0 or a.pinned[s]:
                held += a.size[s]
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            s = a.in_idx[k]
            if last[s] == p and not a.pinned[s]:
                held -= a.size[s]
    return over


@kernel
def bytes_before(a: Arrays, order: Ints, p: int, usage: Ints) -> int:
    """Bytes held when the op at p begins."""
    f = order[p]
    held = int(usage[p] - a.workspace[f])
    for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
        held -= a.size[a.out_idx[k]]
    return held


@kernel
def shift(order: Ints, place: Ints, p: int, q: int) -> None:
    """Move the op at p to q."""
    f = order[p]
    step = 1 if q > p else -1
    while p != q:
        order[p] = order[p + step]
        place[order[p]] = p
        p += step
    order[q] = f
    place[f] = q


@kernel
def move_ops(
    a: Arrays,
    start: Ints,
    limit: int,
    before_ptr: Ints,
    before_idx: Ints,
    after_ptr: Ints,
    after_idx: Ints,
    num_readers: Ints,
    moves: int,
    temperature: float,
    seed: int,
) -> tuple[Ints, int]:
    """`moves` tries from `start`; a move that raises the excess is kept while it is less than `temperature` times all of it."""
    np.random.seed(seed)
    n = len(start)
    order = start.copy()
    place = np.full(len(a.time), -1, np.int64)
    for p in range(n):
        place[order[p]] = p
    last = np.full(len(a.size), -1, np.int64)
    usage = np.empty(n, np.int64)
    held = a.base_bytes
    for s in range(len(a.size)):
        if a.source[s] and num_readers[s] > 0:
            held += a.size[s]
    over = replay_range(a, order, 0, n - 1, held, last, num_readers, limit, usage)
    target = 0
    for _ in range(moves):
        if over == 0:
            break
        p = np.random.randint(0, n)
        if np.random.random() < 0.7:  # near where it is too high
            for _ in range(32):
                if usage[target] > limit:
                    break
                target = np.random.randint(0, n)
            p = min(max(target + int(6.0 * np.random.standard_normal()), 0), n - 1)
            if np.random.random() < 0.1:
                target = np.random.randint(0, n)
        f = order[p]
        low, high = 0, n - 1
        for k in range(before_ptr[f], before_ptr[f + 1]):
            low = max(low, place[before_idx[k]] + 1)
        for k in range(after_ptr[f], after_ptr[f + 1]):
            high = min(high, place[after_idx[k]] - 1)
        if low >= high:
            continue
        if np.random.random() < 0.5:
            reach = 1 + int(np.random.exponential(8.0))
            low, high = max(low, p - reach), min(high, p + reach)
        q = np.random.randint(low, high + 1)
        if q == p:
            continue
        first, final = min(p, q), max(p, q)
        before = 0
        for i in range(first, final + 1):
            before += max(usage[i] - limit, 0)
        held = bytes_before(a, order, first, usage)
        shift(order, place, p, q)
        now = replay_range(a, order, first, final, held, last, num_readers, limit, usage)
        if now - before <= temperature * over * np.random.random():
            over += now - before
        else:
            shift(order, place, q, p)
            replay_range(a, order, first, final, held, last, num_readers, limit, usage)
    return order, over
