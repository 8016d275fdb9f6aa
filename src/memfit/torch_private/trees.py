"""Nested arguments (lists, tuples, dicts, whatever was registered with torch) and their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memfit.torch_private.probe import Symbol

_MAP = Symbol("torch.utils._pytree.tree_map", "walk nested arguments")
_LEAVES = Symbol("torch.utils._pytree.tree_leaves", "walk nested arguments")
_FLATTEN = Symbol("torch.utils._pytree.tree_flatten", "take nested arguments apart")
_UNFLATTEN = Symbol("torch.utils._pytree.tree_unflatten", "put nested arguments together")


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with `function` of every leaf."""
    return _MAP()(function, tree)


def leaves_of(tree: Any) -> list[Any]:
    leaves: list[Any] = _LEAVES()(tree)
    return leaves


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and the structure that `unflatten` puts them back into."""
    leaves, structure = _FLATTEN()(tree)
    return leaves, structure


def unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    return _UNFLATTEN()(leaves, structure)
