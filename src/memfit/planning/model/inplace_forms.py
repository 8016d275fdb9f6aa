"""In-place forms without choosing: an op overwrites its input wherever nobody reads that input again.

    x ─ relu ─> y     x read later     relu writes y beside x
    x ─ relu ─> y     x not needed     relu writes y over x: the bytes of y are never asked for

Which of the two forms runs follows from the rest of the sequence, so planners search over plain forms (a value that was
overwritten cannot be read, and most changes to a plan would run into one), and this pass puts the in-place forms in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.reduce import Arrays, Ints, Model

NONE: Ints = np.zeros(0, np.int64)
"""Where there are no in-place forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """`inplace[f]` does what plain form f does, over an input, in no more time (-1: none); `plain[g]` is the way back (g itself: none)."""

    inplace: Ints
    plain: Ints

    @property
    def known(self) -> Ints:
        """`inplace` as kernels want it: empty where there are none."""
        return self.inplace if self.any else NONE

    @property
    def any(self) -> bool:
        return bool((self.inplace >= 0).any())


def find_siblings(model: Model) -> Siblings:
    inplace, plain = np.full(model.num_forms, -1, np.int64), np.arange(model.num_forms, dtype=np.int64)
    of_op: dict[int, list[int]] = {}
    for f, (op, _) in enumerate(model.forms):
        of_op.setdefault(op, []).append(f)
    for forms in of_op.values():
        for g in (g for g in forms if model.takes[g]):
            for f in (f for f in forms if not model.takes[f]):
                if _is_sibling(model, f, g):
                    plain[g] = f
                    if inplace[f] < 0:
                        inplace[f] = g
    return Siblings(inplace=inplace, plain=plain)


def _is_sibling(model: Model, plain: int, inplace: int) -> bool:
    a = model.arrays
    made = {*model.outs[inplace], *(new for new, _ in model.takes[inplace])}
    if made != set(model.outs[plain]) or set(model.ins[plain]) != set(model.ins[inplace]):
        return False
    return bool(a.time[inplace] <= a.time[plain] and a.workspace[inplace] <= a.workspace[plain])


def use_inplace(a: Arrays, seq: Ints, siblings: Siblings) -> Ints:
    """The same executions, each in place where what it overwrites is not read again, and plain elsewhere."""
    return np.asarray(overwrite(a, siblings.plain[seq], siblings.inplace)) if siblings.any and len(seq) else seq


@kernel
def overwrite(a: Arrays, seq: Ints, inplace: Ints) -> Ints:
    """Walk back from the end: `wanted[s]` says whether the value of s alive at a position is read after it."""
    changed = seq.copy()
    wanted = np.zeros(len(a.size), np.bool_)
    first = np.full(len(a.size), len(seq), np.int64)
    for p in range(len(seq) - 1, -1, -1):
        for k in range(a.out_ptr[seq[p]], a.out_ptr[seq[p] + 1]):
            first[a.out_idx[k]] = p
    for p in range(len(seq) - 1, -1, -1):
        f = seq[p]
        g = inplace[f]
        if g >= 0:
            legal = True
            for k in range(a.take_ptr[g], a.take_ptr[g + 1]):
                old, new = a.take_old[k], a.take_new[k]
                legal &= not wanted[old] and not a.pinned[old] and not (a.pinned[new] and first[new] != p)
            if legal:
                changed[p] = g
        for k in range(a.out_ptr[f], a.out_ptr[f + 1]):
            wanted[a.out_idx[k]] = False
        for k in range(a.take_ptr[f], a.take_ptr[f + 1]):
            wanted[a.take_new[k]] = False
        for k in range(a.in_ptr[f], a.in_ptr[f + 1]):
            wanted[a.in_idx[k]] = True
    return changed
