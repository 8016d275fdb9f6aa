"""Python values as keys: equal for values that mean the same to a step, and never for two objects that only share an address.

plain (numbers, strings, types, enums, ...)   by value; 0.0 and -0.0 differ, and nan is itself
arrays of NumPy, dataclasses, tuples, sets    by their content
anything else                                 by identity, with a reference held: nobody else gets its address
"""

from __future__ import annotations

import enum
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, type, range, slice)


def is_plain(value: Any) -> bool:
    """Whether this has a value of its own that nobody can change."""
    return isinstance(value, (*PLAIN, float, complex))


class Same:
    """Equal to what stands for the same object. Holds it."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"this {type(self.held).__name__}"


def value_key(value: Any) -> Any:
    """A hashable key for a value."""
    kind = type(value)
    if isinstance(value, (float, complex)):
        return (kind, repr(value))
    if isinstance(value, slice):
        return (kind, repr(value))
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if isinstance(value, PLAIN):
        return (kind, value)
    if isinstance(value, (tuple, list)):
        return (kind, tuple(map(value_key, value)))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(map(value_key, value)))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if is_dataclass(value):
        return (kind, tuple((f.name, value_key(getattr(value, f.name, None))) for f in fields(value)))
    return (kind, Same(value))
