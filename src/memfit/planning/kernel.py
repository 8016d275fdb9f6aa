"""Numba behind one typed name: a kernel is compiled on its first call and cached on disk beside its file.

Checks of division and a wrapper for C are left out: nobody uses them, and both take time to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    return cast(Function, njit(cache=True, error_model="numpy", no_cfunc_wrapper=True)(function))
