"""Names that load their files on first use: of a package, or of the algorithms that a door offers by name.

__getattr__, __dir__, __all__ = load_on_use(__name__, {"api": ("schedule",), "trees.read": ("read_tasks",)})
PLANNERS = Registry({"revolve": "memfit.chain.strategies.revolve:plan_revolve"})        PLANNERS["revolve"](chain)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any


def load_on_use(package: str, files: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from its files (a dot in front: beside it) and the names in each."""
    home = {name: f".{file}" for file, names in files.items() for name in names}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    listed = sorted(home)
    return find, lambda: sorted(listed), listed


class Registry(Mapping[str, Any]):
    """What a door offers by name, each entry "module:name"."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, key: str) -> Any:
        module, name = self._places[key].split(":")
        return getattr(import_module(module), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
