"""The arrays that compiled kernels read, as a type of their own: some two dozen plain pointers instead of as many numpy arrays.

    Python     Arrays(in_ptr=array([0, 2, ...]), ...)       numpy arrays, for everything that is not compiled
    kernel     a.in_ptr[f]                                  one load: no reference counts, no strides, no negative indices

Numba takes a numpy array apart into seven values and counts references to it in each function it is passed to. For all
arrays of a model, in forty kernels that call each other, most of the time to compile went there (and none of it was of use: the
model outlives every call). `table` is the struct as kernels see it; whoever holds the `Arrays` holds what it points to.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import NativeValue, lower_builtin, models, register_model, unbox

from memfit.planning.model.arrays import COLUMNS, NUMBERS


class ColumnType(types.Type):  # type: ignore[misc,unused-ignore]
    """One array: a pointer to its address and its length in the table."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"memfit.Column({dtype})")


class ArraysType(types.Type):  # type: ignore[misc,unused-ignore]
    """All of them: a pointer to the table."""

    def __init__(self) -> None:
        super().__init__(name=f"memfit.Arrays({', '.join((*COLUMNS, *NUMBERS))})")


@register_model(ColumnType)
@register_model(ArraysType)
class _PointerModel(models.PrimitiveModel):  # type: ignore[misc,unused-ignore]
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _INT.as_pointer())


_INT = cgutils.intp_t
ARRAYS = ArraysType()
_COLUMN_TYPES = {np.dtype(np.int64): ColumnType(types.int64), np.dtype(np.bool_): ColumnType(types.boolean)}


@unbox(ArraysType)  # type: ignore[untyped-decorator,unused-ignore]
def _unbox(kind: ArraysType, value: Any, c: Any) -> NativeValue:
    table = c.pyapi.object_getattr_string(value, "table")
    numbers = c.builder.bitcast(c.pyapi.bytes_as_string(table), _INT.as_pointer())
    c.pyapi.decref(table)  # the Arrays hold it
    return NativeValue(numbers)


@infer_getattr
class _Attributes(AttributeTemplate):  # type: ignore[misc,unused-ignore]
    key = ArraysType

    def generic_resolve(self, arrays: ArraysType, name: str) -> types.Type | None:
        return types.int64 if name in NUMBERS else _COLUMN_TYPES[COLUMNS[name]] if name in COLUMNS else None


@lower_getattr_generic(ArraysType)  # type: ignore[untyped-decorator,unused-ignore]
def _attribute(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    if name in NUMBERS:
        return _constant(builder, value, 2 * len(COLUMNS) + NUMBERS.index(name))
    return cgutils.gep_inbounds(builder, value, 2 * list(COLUMNS).index(name))


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):  # type: ignore[misc,unused-ignore]
    def generic(self, args: tuple[Any, ...], kws: Any) -> Any:
        column, index = args
        if isinstance(column, ColumnType) and isinstance(index, types.Integer):
            return signature(column.dtype, column, types.intp)
        return None


@lower_builtin(operator.getitem, ColumnType, types.intp)  # type: ignore[untyped-decorator,unused-ignore]
def _get_item(context: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
    data = builder.inttoptr(_constant(builder, args[0], 0), context.get_data_type(sig.return_type).as_pointer())
    return context.unpack_value(builder, sig.return_type, builder.gep(data, [args[1]]))


@infer_global(len)
class _Len(AbstractTemplate):  # type: ignore[misc,unused-ignore]
    def generic(self, args: tuple[Any, ...], kws: Any) -> Any:
        return signature(types.intp, args[0]) if isinstance(args[0], ColumnType) else None


@lower_builtin(len, ColumnType)  # type: ignore[untyped-decorator,unused-ignore]
def _len(context: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
    return _constant(builder, args[0], 1)


def _constant(builder: Any, table: Any, place: int) -> Any:
    """A number of the table, which never changes: LLVM may read it once and keep it."""
    number = builder.load(cgutils.gep_inbounds(builder, table, place))
    number.set_metadata("invariant.load", builder.module.add_metadata([]))
    return number
