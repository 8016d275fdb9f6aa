"""HiGHS's branch and bound behind one function that answers with values and a bound, and keeps stdout clean.

The solver prints a line of its own now and then, whatever it is told about logging. Standard output is for data, so while
it runs the process's stdout goes to stderr.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from memfit.planning.model.reduce import Flags, Floats

_STDOUT, _STDERR = 1, 2
_redirecting = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """`x` is None when nothing was found; `bound` holds for every solution; `proven`: `x` is optimal within the gap."""

    x: Floats | None
    bound: float
    proven: bool


def solve_mixed(
    cost: Floats,
    matrix: csr_matrix,
    right: Floats,
    whole: Flags,
    *,
    time_limit_s: float,
    gap: float,
    low: Floats | float = 0.0,
    high: Floats | float = 1.0,
) -> Mixed:
    """min cost·x with matrix x <= right and x in [low, high], whole where `whole` says so."""
    with redirect_stdout():
        found = milp(
            cost,
            constraints=LinearConstraint(matrix, -np.inf, right),
            integrality=whole.astype(np.int64),
            bounds=Bounds(low, high),
            options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": gap},
        )
    bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
    return Mixed(x=None if found.x is None else np.asarray(found.x), bound=bound, proven=found.status == 0)


@contextmanager
def redirect_stdout() -> Iterator[None]:
    """Whatever compiled code prints on stdout appears on stderr. One thread at a time; where there is no stdout, nothing happens."""
    with _redirecting:
        try:
            kept = os.dup(_STDOUT)
        except OSError:
            yield
            return
        try:
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            with suppress(OSError):
                os.dup2(_STDERR, _STDOUT)
            yield
        finally:
            _flush_compiled()
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _flush_compiled() -> None:
    """C's own buffer, which would reach the real stdout later."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
