"""Numba behind one typed name: a kernel is compiled on its first call and cached on disk beside its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    return cast(Function, njit(cache=True)(function))
