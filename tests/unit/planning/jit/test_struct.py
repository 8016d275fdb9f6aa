"""The kernels' own array type: it reads what numpy holds, and copies point to their own arrays."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

from memfit.jit.kernel import kernel
from memfit.planning.model.arrays import Arrays, Ints


def _arrays(numbers: list[int], flags: list[bool], *, base_bytes: int = 7) -> Arrays:
    ints, bools = np.array(numbers, np.int64), np.array(flags, np.bool_)
    integer = {name: ints + place for place, name in enumerate(_INTEGERS)}
    return Arrays(**integer, **{name: bools.copy() for name in _FLAGS}, base_bytes=base_bytes, num_ops=3)


_INTEGERS = [
    "in_ptr",
    "in_idx",
    "out_ptr",
    "out_idx",
    "take_ptr",
    "take_new",
    "take_old",
    "prod_ptr",
    "prod_idx",
    "size",
    "time",
    "workspace",
    "op",
]
_FLAGS = ["replayable", "seeded", "pinned", "source"]


@kernel
def told(a: Arrays, out: Ints) -> int:
    """Something of everything."""
    total = 0
    for i in range(len(a.size)):
        out[i] = a.size[i] * 1000 + a.op[i]
        if a.source[i] and not a.pinned[len(a.pinned) - 1 - i]:
            total += a.in_ptr[i]
    return total * 100 + a.base_bytes + a.num_ops


def _expected(a: Arrays) -> tuple[int, list[int]]:
    hits = sum(int(a.in_ptr[i]) for i in range(len(a.size)) if a.source[i] and not a.pinned[len(a.pinned) - 1 - i])
    return hits * 100 + a.base_bytes + a.num_ops, [int(s) * 1000 + int(o) for s, o in zip(a.size, a.op, strict=True)]


def _heard(a: Arrays) -> tuple[int, list[int]]:
    out = np.zeros(len(a.size), np.int64)
    return int(told(a, out)), out.tolist()


@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_kernels_read_what_numpy_holds(count: int) -> None:
    random = np.random.default_rng(count)
    a = _arrays(random.integers(-(2**40), 2**40, count).tolist(), random.integers(0, 2, count).astype(bool).tolist())
    assert _heard(a) == _expected(a)


def test_kernels_see_changes_in_place() -> None:
    a = _arrays([1, 2, 3], [True, True, False])
    a.size[1] = 41
    assert _heard(a) == _expected(a)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_outlive_what_they_were_copied_from(copied) -> None:  # type: ignore[no-untyped-def]
    a = _arrays(list(range(1000)), [True, False] * 500)
    b, expected = copied(a), _expected(a)
    if copied is not copy.copy:
        assert a.table != b.table
    del a
    gc.collect()
    filler = [np.full(1000, -1, np.int64) for _ in range(50)]  # takes the place of what was freed
    assert _heard(b) == expected
    assert len(filler) == 50


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int32), np.zeros((3, 1), np.int64), np.zeros(6, np.int64)[::2]])
def test_other_kinds_of_arrays_are_refused(wrong: Ints) -> None:
    a = _arrays([1, 2, 3], [True, True, False])
    values = {name: getattr(a, name) for name in (*_INTEGERS, *_FLAGS)}
    with pytest.raises(AssertionError, match="size"):
        Arrays(**{**values, "size": wrong}, base_bytes=0, num_ops=1)
