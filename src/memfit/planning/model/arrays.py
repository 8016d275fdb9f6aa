"""The step as arrays: what compiled kernels read, and everything else too. `jit/struct.py` says how kernels see it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """What the compiled kernels read. `x_ptr[i]:x_ptr[i + 1]` is the range of item i in the flat lists."""

    in_ptr: Ints
    in_idx: Ints  # storages a form reads, without those always resident
    out_ptr: Ints
    out_idx: Ints  # storages a form allocates
    take_ptr: Ints
    take_new: Ints  # storages that take over the bytes of `take_old` in place
    take_old: Ints
    prod_ptr: Ints
    prod_idx: Ints  # forms that make a storage, the default one first
    size: Ints
    time: Ints
    workspace: Ints
    op: Ints  # the op of a form: what runs once, or draws random numbers, is an op
    replayable: Flags
    seeded: Flags  # first runs keep op order
    pinned: Flags  # results that are not sources: held from their first production to the end
    source: Flags  # present at the start and free to go after their last use
    base_bytes: int  # held throughout, whatever the plan
    num_ops: int  # ops of forms are below this
    table: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers: list[int] = []
        for name, dtype in COLUMNS.items():
            column = getattr(self, name)
            assert (column.dtype, column.ndim, column.flags.c_contiguous) == (dtype, 1, True), name
            numbers += [column.ctypes.data, len(column)]
        numbers += [getattr(self, name) for name in NUMBERS]
        object.__setattr__(self, "table", np.array(numbers, np.int64).tobytes())

    @property
    def _numba_type_(self) -> Any:
        return _struct()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies point to their own arrays."""
        return _arrays, tuple(getattr(self, name) for name in (*COLUMNS, *NUMBERS))


COLUMNS = {f.name: np.dtype(np.int64 if f.type == "Ints" else np.bool_) for f in fields(Arrays) if f.type in ("Ints", "Flags")}
NUMBERS = tuple(f.name for f in fields(Arrays) if f.type == "int")


@cache
def _struct() -> Any:
    """Numba asks for it when a kernel is called with such arrays: no earlier is numba imported."""
    from memfit.planning.jit.struct import ARRAYS

    return ARRAYS


def _arrays(*values: Any) -> Arrays:
    return Arrays(**dict(zip((*COLUMNS, *NUMBERS), values, strict=True)))
