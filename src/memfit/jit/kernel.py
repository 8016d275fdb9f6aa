"""Kernels: functions of arrays that numba compiles on their first call and caches on disk beside their file.

    @kernel               always machine code                     @kernel_above(4_000)  plain Python on short arrays
    @inline_kernel        compiled into the kernels that call it  @kernel_helper        the same, and plain Python from Python

To import numba and load a kernel takes about half a second, to compile it seconds, once per installation: no file that
defines kernels imports numba, only a call does. What only costs time to compile is left out: checks of division, a wrapper
for C, and a second version of a kernel for the callers that pass a literal number (`f(..., 0)` beside
`f(..., stamp)`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
_lock = Lock()


class Kernel:
    """A function, as Python and compiled; numba sees the compiled one, so that kernels call each other."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.python = function
        self.__doc__ = function.__doc__
        self._options = options
        self._compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled or self.compiled)(*args, **kwargs)

    @property
    def compiled(self) -> Any:
        """Numba's dispatcher; the plain function where numba is switched off."""
        if self._compiled is None:
            with _lock:
                self._compiled = self._compiled or _compile(self.python, **self._options)
        return self._compiled

    @property
    def _numba_type_(self) -> Any:
        return self.compiled._numba_type_

    @property
    def targetoptions(self) -> Any:
        return self.compiled.targetoptions

    @property
    def py_func(self) -> Callable[..., Any]:
        return self.python

    def compile_always(self) -> None:
        """From now on machine code, however short the arrays."""


class _Helper(Kernel):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.python(*args, **kwargs)


class _KernelAbove(Kernel):
    def __init__(self, function: Callable[..., Any], size: int, patience_s: float) -> None:
        super().__init__(function)
        self._size, self._patience_s = size, patience_s

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args[0]) >= self._size or self._patience_s <= 0:
            return self.compiled(*args, **kwargs)
        began = perf_counter()
        result = self.python(*args, **kwargs)
        self._patience_s -= perf_counter() - began
        return result

    def compile_always(self) -> None:
        self._size = 0


def kernel(function: Function, **options: Any) -> Function:
    return cast(Function, Kernel(function, **options))


def kernel_above(size: int, *, patience_s: float = inf) -> Callable[[Function], Function]:
    """Plain Python while the first argument is shorter than `size`, until that has taken `patience_s` in all; then compiled."""

    def make(function: Function) -> Function:
        return cast(Function, _KernelAbove(function, size, patience_s))

    return make


def inline_kernel(function: Function) -> Function:
    """A kernel that is compiled as a part of its one caller, not once more on its own."""
    return cast(Function, Kernel(function, inline="always"))


def kernel_helper(function: Function) -> Function:
    """What kernels call and Python never does, but in a kernel's plain form: without wrappers it compiles in half the time."""
    return cast(Function, _Helper(function, cache=False, no_cpython_wrapper=True))


def get_python(function: Function) -> Function:
    """The plain function behind a kernel."""
    return cast(Function, cast(Any, function).python)


def is_loaded(function: Any) -> bool:
    """Whether numba has this kernel in this process, compiled or about to be."""
    return function._compiled is not None


def is_cached(function: Any) -> bool:
    """Whether this kernel is on disk, for its source as it is; also where that cannot be found out, or numba is switched off."""
    compiled = function.compiled
    kept = vars(compiled).get("_cache") if compiled is not function.python else None
    return kept is None or bool(compiled.overloads) or not hasattr(kept, "has_entries") or kept.has_entries()


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    from numba import njit

    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **options}
    is_kept = options.pop("cache", True)
    compiled = njit(**options)(function)
    if compiled is not function:
        if is_kept:
            _keep(compiled, function)
        if "inline" not in options:
            _take_any_number(compiled)
    return compiled


def _keep(compiled: Any, function: Callable[..., Any]) -> None:
    """On disk; where numba finds no place, or keeps its files in another way, every process compiles anew."""
    try:
        from memfit.jit.kernel_cache import KernelCache

        compiled._cache = KernelCache(function)
    except (RuntimeError, ImportError, AttributeError, TypeError, OSError):
        return


def _take_any_number(compiled: Any) -> None:
    from numba import types

    template = compiled.get_call_template

    def for_any_number(args: Any, kws: Any) -> Any:
        return template(tuple(map(types.unliteral, args)), {name: types.unliteral(arg) for name, arg in kws.items()})

    compiled.get_call_template = for_any_number
