"""What can run and what can be there before a cut: the sets a cut's program is written over.

a ─> b ─> c ─> d        before c is first made: a and b can run, their results can be there; d cannot
a ─> e                  and e can, before or after
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.planning.model.reduce import Flags, Model


def find_runnable_without(model: Model, cut: int) -> Flags:
    """The forms that can run before storage `cut` has ever been made."""
    have = model.arrays.source.copy()
    able = np.zeros(model.num_forms, np.bool_)
    makers = set(model.producers[cut])
    changed = True
    while changed:  # one pass when ops are in order; more only for alternative producers that come later
        changed = False
        for f in range(model.num_forms):
            if not able[f] and f not in makers and all(have[s] for s in model.ins[f]):
                able[f] = changed = True
                for s in model.outs[f]:
                    have[s] = True
                for s, _ in model.takes[f]:
                    have[s] = True
    return able


def find_takers(model: Model) -> dict[int, list[int]]:
    """The forms that overwrite each storage that any form overwrites."""
    takers: dict[int, list[int]] = {}
    for f, takes in enumerate(model.takes):
        for _, old in takes:
            takers.setdefault(old, []).append(f)
    return takers


def make_flags(items: Sequence[int], count: int) -> Flags:
    flags = np.zeros(count, np.bool_)
    flags[list(items)] = True
    return flags


def find_made_by_several(model: Model, forms: Flags) -> Flags:
    """The storages that two or more of these forms can make."""
    return np.array([sum(bool(forms[f]) for f in makers) > 1 for makers in model.producers], np.bool_)


def find_makeable(model: Model, forms: Flags) -> Flags:
    """The storages that can be there when only these forms may have run."""
    have = model.arrays.source.copy()
    for f in np.flatnonzero(forms):
        have[[*model.outs[f], *(new for new, _ in model.takes[f])]] = True
    return have
