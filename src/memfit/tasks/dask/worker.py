"""What runs on a worker: a store of outputs by key, and the functions that fill, read, empty, write out and read back.

    driver ── execute(task, inputs at ...) ──> worker 1: take own values, fetch others, compute, keep the output
           ── discard(keys) ──────────────────> worker 2: gone at once, without waiting for garbage collection

Knows no engine: the fetch function and the address come from the caller. Values never travel through the driver.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memfit.core.files import write_whole

Key = Hashable
Fetch = Callable[[str, Key], Any]
_STORES: dict[str, dict[Key, Any]] = {}


class InputLost(Exception):
    """A value cannot be read because its worker is gone."""


class Call:
    """A task's function, hidden from the engine's own search for references: called with the values of `names`, in order."""

    def __init__(self, node: Callable[[Mapping[Any, Any]], Any], names: Sequence[Key]) -> None:
        self.node, self.names = node, tuple(names)

    def __call__(self, *values: Any) -> Any:
        """Values past the names are there for the order alone."""
        return compact(self.node(dict(zip(self.names, values, strict=False))))


def compact(value: Any) -> Any:
    """A copy of a slice whose array is much larger, because a slice keeps all of its array alive; any other value as it is."""
    if isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray) and value.base.nbytes > 1.25 * value.nbytes:
        return value.copy()
    return value


def store(run: str) -> dict[Key, Any]:
    return _STORES.setdefault(run, {})


def execute(
    run: str, key: Key, call: Call, sources: Sequence[tuple[Key, str]], here: str, fetch: Fetch, sizeof: Callable[[Any], int]
) -> int:
    """Run one task and keep its output; returns its size. Copies of inputs from elsewhere live as long as the task."""
    mine = store(run)
    values = [mine[source] if address == here else fetch(address, source) for source, address in sources]
    result = call(*values)
    mine[key] = result
    return int(sizeof(result))


def discard(run: str, keys: Sequence[Key]) -> None:
    mine = store(run)
    for key in keys:
        mine.pop(key, None)


def forget(run: str) -> None:
    _STORES.pop(run, None)


def write_out(value: Any, path: str) -> str:
    """A worker that dies half-way leaves no half file."""
    with write_whole(path) as file:
        pickle.dump(value, file, protocol=5)
    return path


def read_back(path: str) -> Any:
    with Path(path).open("rb") as file:
        return pickle.load(file)


def move_out(run: str, key: Key, path: str) -> None:
    write_out(store(run)[key], path)
    discard(run, [key])


def move_in(run: str, key: Key, path: str) -> None:
    store(run)[key] = read_back(path)
