"""The just-in-time builder: what was dropped is recomputed right before the op that reads it, and no earlier.

    agenda   a  b  c  d │ D  C  B  A          after the turn (│) only the kept values are there
    keep     {b}        │
    result   a  b  c  d │ D  c' C  B  a' A    c' from b, a' from nothing

The result is a sequence with repeats whose lifetimes follow from it; executions nobody reads any more (a value that
only the second half uses, and that is recomputed there) disappear, which *sinks* them at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.fast_judge import drop_dead
from memfit.planning.model.reduce import Arrays, Flags, Ints, Model


@kernel
def double(values: Ints) -> Ints:
    longer = np.empty(2 * len(values), np.int64)
    for i in range(len(values)):
        longer[i] = values[i]
    return longer


@kernel
def run_with_inputs(
    a: Arrays, target: int, maker: Ints, have: Flags, once: Flags, ran: Flags, stack: Ints, out: Ints, n: int, longest: int
) -> tuple[int, Ints, Ints]:
    """Append `target` to `out`, after whatever makes its missing inputs; returns the new length, and both buffers, perhaps grown."""
    stack[0] = target
    top = 1
    while top > 0 and n < longest:  # in-place makers could chase each other for ever
        f = stack[top - 1]
        if top > 1 or a.replayable[f] or not ran[f]:
            missing = False
            for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
                s = a.in_idx[k]
                if not have[s] and maker[s] >= 0:
                    if top == len(stack):
                        stack = double(stack)
                    stack[top] = maker[s]
                    top += 1
                    missing = True
                    break
            if missing:
                continue
            if n == len(out):
                out = double(out)
            out[n] = f
            n += 1
            ran[f] = True
            for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
                have[a.out_idx[k]] = True
                once[a.out_idx[k]] |= not a.replayable[f]
            for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
                have[a.take_old[k]] = False
                have[a.take_new[k]] = True
                once[a.take_new[k]] |= not a.replayable[f]
        top -= 1
    return n, stack, out


@kernel
def drop_others(a: Arrays, form: int, keep: Flags, have: Flags, once: Flags) -> None:
    """Forget what is neither kept nor just made by `form`, as far as it can be made again."""
    fresh = np.zeros(len(a.size), np.bool_)
    for k in range(a.out_ptr[form], a.out_ptr[form + 1]):
        fresh[a.out_idx[k]] = True
    for k in range(a.take_ptr[form], a.take_ptr[form + 1]):
        fresh[a.take_new[k]] = True
    for s in range(len(a.size)):
        if not keep[s] and not fresh[s] and not a.source[s] and not a.pinned[s] and not once[s]:
            have[s] = False


@kernel
def build(a: Arrays, agenda: Ints, turns: Ints, keeps: Flags, makers: Ints) -> Ints:
    """Run `agenda`; have `keeps[j]` there when its position `turns[j]` runs and drop the rest; recompute missing inputs by `makers`.

    `makers[j]` holds up to the turn j, the last one from there on.
    """
    num = len(a.size)
    have = np.zeros(num, np.bool_)
    made = np.zeros(num, np.bool_)
    for s in range(num):
        have[s] = a.source[s]
    once = np.zeros(num, np.bool_)
    ran = np.zeros(len(a.time), np.bool_)
    out = np.empty(64 + 4 * len(agenda), np.int64)
    stack = np.empty(64 + 4 * len(a.time), np.int64)
    n, seen, stage = 0, 0, 0
    longest = 64 * (len(agenda) + 16)
    for i in range(len(agenda)):
        maker = makers[min(stage, len(makers) - 1)]
        for j in range(len(turns)):
            if turns[j] != i:
                continue
            for p in range(seen, n):
                for k in range(a.out_ptr[out[p]], a.out_ptr[out[p] + 1]):
                    made[a.out_idx[k]] = True
                for k in range(a.take_ptr[out[p]], a.take_ptr[out[p] + 1]):
                    made[a.take_new[k]] = True
            seen = n
            for s in range(num):  # made, dropped and wanted again: last chance
                if keeps[j, s] and made[s] and not have[s] and maker[s] >= 0 and a.replayable[maker[s]]:
                    n, stack, out = run_with_inputs(a, maker[s], maker, have, once, ran, stack, out, n, longest)
        n, stack, out = run_with_inputs(a, agenda[i], maker, have, once, ran, stack, out, n, longest)
        for j in range(len(turns)):
            if turns[j] == i:
                drop_others(a, agenda[i], keeps[j], have, once)
                stage += 1
    return out[:n]


def default_makers(model: Model) -> Ints:
    """For each storage the form that makes it again: its default producer, unless that may run only once."""
    makers = np.full(model.num_storages, -1, np.int64)
    for s, forms in enumerate(model.producers):
        if forms:
            makers[s] = forms[0]
    return makers


def keep_at(
    model: Model, turns: Sequence[int], keeps: Sequence[Iterable[int]], agenda: Ints | None = None, makers: Ints | None = None
) -> Ints:
    """The sequence that keeps exactly `keeps[j]` at position `turns[j]` of the agenda and recomputes the rest when it is read.

    `makers` says by which forms: throughout, or a row for what is before each turn and one for what is after the last.
    """
    order = np.array(model.agenda, np.int64) if agenda is None else agenda
    flags = np.zeros((len(turns), model.num_storages), np.bool_)
    for row, keep in zip(flags, keeps, strict=True):
        row[np.fromiter(keep, np.int64)] = True
    chosen = np.atleast_2d(default_makers(model) if makers is None else makers)
    return np.asarray(drop_dead(model.arrays, build(model.arrays, order, np.array(turns, np.int64), flags, chosen)))


def turning_point(model: Model, usage: Ints) -> int:
    """Where the keep-all step holds most: the turn from forward to backward, as far as memory is concerned."""
    return int(np.argmax(usage)) if len(usage) else 0
