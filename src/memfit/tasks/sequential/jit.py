"""Loops over arrays that run as plain Python on small inputs and as machine code (numba) on large ones.

Importing numba and loading a compiled loop costs about half a second; a tree of a thousand tasks is ordered in less.
The first call on a large input compiles (seconds, once per installation: the result is cached on disk).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
SMALL = 4_000


class Kernel(Generic[P, R]):
    """A function of arrays; the length of its first argument decides how it runs."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._python = function
        self._compiled: Callable[P, R] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if len(first) < SMALL:
            return self._python(*args, **kwargs)
        return self.compiled(*args, **kwargs)

    @property
    def compiled(self) -> Callable[P, R]:
        if self._compiled is None:
            import numba

            self._compiled = numba.njit(cache=True)(self._python)
        return self._compiled


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    return Kernel(function)
