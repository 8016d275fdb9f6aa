"""Numba behind one typed name: a kernel is compiled on its first call and cached on disk beside its file.

What only costs time to compile is left out: checks of division, a wrapper for C, and a second version of a kernel for the
callers that pass a literal number (`effect(..., 0)` beside `effect(..., stamp)`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    return cast(Function, _without_literals(njit(cache=True, error_model="numpy", no_cfunc_wrapper=True)(function)))


def inlined(function: Function) -> Function:
    """A kernel that is compiled as a part of its one caller, not once more on its own."""
    return cast(Function, njit(cache=True, error_model="numpy", no_cfunc_wrapper=True, inline="always")(function))


def is_cached(compiled: Any) -> bool:
    """Whether this kernel is on disk, for its source as it is; also where that cannot be found out, or numba is switched off."""
    try:
        return not isinstance(compiled, Dispatcher) or bool(compiled.overloads) or bool(vars(compiled)["_cache"]._cache_file._load_index())
    except (KeyError, AttributeError, OSError, ValueError):
        return True


def _without_literals(compiled: Any) -> Any:
    if isinstance(compiled, Dispatcher):  # a plain function where numba is switched off
        template = compiled.get_call_template

        def for_any_number(args: Any, kws: Any) -> Any:
            return template(tuple(map(types.unliteral, args)), {name: types.unliteral(arg) for name, arg in kws.items()})

        vars(compiled)["get_call_template"] = for_any_number
    return compiled
