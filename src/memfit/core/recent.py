"""A bounded dictionary that forgets what was used the longest ago, and with it the memory it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
MOST = 64
"""Plans kept by one fitted model: shapes of a bucketed loader fit, a loader with a new shape at every step does not pile them up."""


class Recent(Generic[_T]):
    """Keeps the `most` that were found or kept last."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[Any, _T] = OrderedDict()

    def find(self, key: Any) -> _T | None:
        """What was kept under this key; it counts as used now."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def keep(self, key: Any, value: _T) -> _T:
        """Keep this value; the one used the longest ago falls out where there are too many."""
        self._known[key] = value
        self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return value

    def values(self) -> Iterator[_T]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)
