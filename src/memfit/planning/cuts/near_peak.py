"""Where to cut: at what every plan must make, where the plain step holds most."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memfit.planning.cuts.program import CutProgram
from memfit.planning.model.fast_judge import usage_of
from memfit.planning.model.lower_bounds import find_required
from memfit.planning.model.reduce import Model


def cuts_near_peak(model: Model) -> Iterator[int]:
    """Storages every plan must make, in order of how much the plain step holds when it makes them, one for each op."""
    agenda = np.array(model.agenda, np.int64)
    required = find_required(model)
    seen: set[int] = set()
    for p in np.argsort(-usage_of(model.arrays, agenda), kind="stable"):
        for s in model.outs[agenda[p]]:
            if s in required and s not in seen and model.arrays.size[s] >= 0:
                seen.add(s)
                yield s
                break


def first_program(model: Model) -> CutProgram | None:
    """The program of the cut where the plain step holds most; None where there is no cut."""
    cut = next(cuts_near_peak(model), None)
    return None if cut is None else CutProgram(model, (cut,))
