"""Numba behind one typed name: a kernel is compiled on its first call and cached on disk beside its file.

What only costs time to compile is left out: checks of division, a wrapper for C, and a second version of a kernel for the
callers that pass a literal number (`effect(..., 0)` beside `effect(..., stamp)`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    compiled = _compiled(function)
    if isinstance(compiled, Dispatcher):  # a plain function where numba is switched off
        _without_literals(compiled)
    return cast(Function, compiled)


def inlined(function: Function) -> Function:
    """A kernel that is compiled as a part of its one caller, not once more on its own."""
    return cast(Function, _compiled(function, inline="always"))


def is_cached(compiled: Any) -> bool:
    """Whether this kernel is on disk, for its source as it is; also where that cannot be found out, or numba is switched off."""
    try:
        return not isinstance(compiled, Dispatcher) or bool(compiled.overloads) or bool(_cache_file(compiled)._load_index())
    except (KeyError, AttributeError, OSError, ValueError):
        return True


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    try:
        compiled = njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    except RuntimeError:  # nowhere to write to: compiled anew in every process
        return njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    try:
        file = _cache_file(compiled)
        file._source_stamp = (file._source_stamp, _sources())
    except (KeyError, AttributeError):  # switched off, or a numba that keeps its files in another way
        pass
    return compiled


def _cache_file(compiled: Any) -> Any:
    return vars(compiled)["_cache"]._cache_file


@cache
def _sources() -> tuple[tuple[str, float, int], ...]:
    """The state of all files with kernels: numba looks at a kernel's own file, but what it calls is compiled into it."""
    here = sorted(Path(__file__).parents[1].rglob("*.py"))
    sources = [path for path in here if path.name == "struct.py" or b"@kernel" in path.read_bytes()]
    return tuple((path.name, path.stat().st_mtime, path.stat().st_size) for path in sources)


def _without_literals(compiled: Any) -> None:
    template = compiled.get_call_template

    def for_any_number(args: Any, kws: Any) -> Any:
        return template(tuple(map(types.unliteral, args)), {name: types.unliteral(arg) for name, arg in kws.items()})

    compiled.get_call_template = for_any_number
