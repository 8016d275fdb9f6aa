"""Nested arguments (lists, tuples, dicts, whatever was registered with torch) and their leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from memfit.torch_private.probe import Symbol

_MAP = Symbol("torch.utils._pytree.tree_map", "walk nested arguments")
_LEAVES = Symbol("torch.utils._pytree.tree_leaves", "walk nested arguments")
_FLATTEN = Symbol("torch.utils._pytree.tree_flatten", "take nested arguments apart")
_REGISTER = Symbol("torch.utils._pytree.register_pytree_node", "take results apart")
_UNFLATTEN = Symbol("torch.utils._pytree.tree_unflatten", "put nested arguments together")


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with `function` of every leaf."""
    return _MAP()(function, tree)


def leaves_of(tree: Any) -> list[Any]:
    leaves: list[Any] = _LEAVES()(tree)
    return leaves


class TakenApart:
    """A dataclass as nested arguments: its fields, and the object to put them back into. torch takes it for a leaf otherwise."""

    def __init__(self, empty: Any, fields: dict[str, Any]) -> None:
        self.empty, self.fields = empty, fields

    @staticmethod
    def parts(apart: TakenApart) -> tuple[list[Any], Any]:
        return list(apart.fields.values()), (apart.empty, tuple(apart.fields))

    @staticmethod
    def together(values: Iterable[Any], about: Any) -> Any:
        empty, names = about
        made = copy.copy(empty)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made


@functools.cache
def _register() -> None:
    _REGISTER()(TakenApart, TakenApart.parts, TakenApart.together)


def take_apart(tree: Any) -> Any:
    """Nested results in which dataclasses that hold tensors are containers too; flattened and put together they are what they were."""
    _register()
    return map_leaves(_take_one_apart, tree)


def _take_one_apart(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or not tensors_inside(value):
        return value
    fields = {f.name: take_apart(getattr(value, f.name)) for f in dataclasses.fields(value)}
    empty = copy.copy(value)
    for name in fields:
        object.__setattr__(empty, name, None)
    return TakenApart(empty, fields)


def tensors_inside(value: Any) -> list[torch.Tensor]:
    """Tensors that an object holds in its attributes and containers, itself not being one."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    if not isinstance(value, torch.Tensor):
        map_inside(value, note)
    return found


def map_inside(value: Any, function: Callable[[torch.Tensor], torch.Tensor], depth: int = 6) -> Any:
    """The object with `function` of every tensor in its attributes, lists and dictionaries, which are changed in place. Modules are left
    alone: their tensors are a model's state."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if depth and isinstance(value, (tuple, set, frozenset)) and type(value) in (tuple, set, frozenset):
        return type(value)([map_inside(item, function, depth - 1) for item in value])
    inside = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else getattr(value, "__dict__", None)
    if not depth or isinstance(value, (torch.nn.Module, type, ModuleType)) or not isinstance(inside, dict):
        return value
    for name, item in list(inside.items()):
        changed = map_inside(item, function, depth - 1)
        if changed is not item:
            (value if isinstance(value, list) else inside)[name] = changed
    return value


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and the structure that `unflatten` puts them back into."""
    leaves, structure = _FLATTEN()(tree)
    return leaves, structure


def unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    return _UNFLATTEN()(leaves, structure)
