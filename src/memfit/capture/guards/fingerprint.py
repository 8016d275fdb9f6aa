"""What a step depends on, by value, for a model that Dynamo does not capture: memfit's own trace is known by it.

    modules        class and its functions, plain attributes, hooks, flags, shapes and types of parameters and buffers
    functions      code, defaults, closures, and the globals they name; followed from `forward` and from the loss
    values         numbers, texts, containers, objects by their attributes, four levels deep; below by identity, held
    surroundings   default type, deterministic algorithms, environment, hooks on all modules

It is walked before every step, so it costs more than Dynamo's guards: tenths of a millisecond for a small model, some for a large one.
"""

from __future__ import annotations

import functools
import logging
import os
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memfit.capture.guards.values import Same, is_plain, value_key
from memfit.torch_private.tensors import global_module_hooks, own_tensors

_DEPTH = 4
_LIBRARIES = (
    *("torch", "numpy", "random", "builtins", "logging", "functools", "typing", "collections", "os"),
    *("copy", "copyreg", "pickle", "inspect", "re", "json", "warnings", "contextlib"),  # they have tables that grow with every import
)
_OPAQUE = (types.ModuleType, types.BuiltinFunctionType, logging.Logger)
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "__annotations__"})


class Walk:
    """One look at everything. `found` is what it saw, in order; `names` says what each was, if asked for."""

    def __init__(self, *, named: bool = False) -> None:
        self.found: list[Any] = []
        self.names: list[str] = []
        self._named = named
        self._seen: dict[int, tuple[int, Any]] = {}  # object -> its number, and the object: nobody else gets its address meanwhile

    def _put(self, path: str, value: Any) -> None:
        self.found.append(value)
        if self._named:
            self.names.append(path)

    def _below(self, path: str, name: Any) -> str:
        return f"{path}.{name}" if self._named else ""

    def _is_new(self, path: str, value: Any) -> bool:
        """Puts down which object of those met before this is, if it is one."""
        before = self._seen.get(id(value))
        if before is not None:
            self._put(path, before[0])
            return False
        self._seen[id(value)] = (len(self._seen), value)
        return True

    def surroundings(self) -> None:
        self._put("default dtype", torch.get_default_dtype())
        self._put("deterministic algorithms", torch.are_deterministic_algorithms_enabled())
        self._put("functions of torch.nn.functional", tuple(f for f in vars(nn.functional).values() if callable(f)))
        self._put("environment", frozenset(os.environ.items()))
        self._put("hooks on all modules", tuple(tuple(map(Same, hooks)) for hooks in global_module_hooks()))

    def value(self, path: str, value: Any, depth: int = 0) -> None:
        if is_plain(value):
            self._put(path, value_key(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, _OPAQUE):
            self._put(path, Same(value))
        elif not self._is_new(path, value):
            pass
        elif isinstance(value, nn.Module):
            self._module(path, value, depth)
        elif isinstance(value, types.MethodType):
            self.value(path, value.__self__, depth)
            self.value(path, value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self._function(path, value, depth)
        elif depth >= _DEPTH:
            self._put(path, Same(value))
        else:
            self._inside(path, value, depth + 1)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        self._put(path, type(value))
        if isinstance(value, functools.partial):
            self._items(path, (value.func, value.args, value.keywords), depth)
        elif isinstance(value, dict):
            self._put(path, tuple(map(value_key, value)))
            self._items(path, value.values(), depth)
        elif isinstance(value, (list, tuple)):
            self._put(path, len(value))
            self._items(path, value, depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            for name, item in vars(value).items():
                self.value(self._below(path, name), item, depth)
        elif hasattr(type(value), "__slots__"):
            for name in _slots_of(type(value)):
                self.value(self._below(path, name), getattr(value, name, None), depth)
        else:
            self._put(path, value_key(value))

    def _items(self, path: str, items: Iterable[Any], depth: int) -> None:
        for number, item in enumerate(items):
            self.value(self._below(path, number), item, depth)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        if self._is_new(path, tensor):
            strides = tensor.stride() if tensor.layout is torch.strided else None
            self._put(path, (type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad))

    def _module(self, path: str, module: nn.Module, depth: int) -> None:
        kind = type(module)
        self._put(f"{path}.__class__" if self._named else "", kind)
        if self._is_new(path, kind):
            self._class(path, kind)
        for tensors in own_tensors(module):
            for name, tensor in tensors.items():
                self.value(self._below(path, name), tensor)
        for name, value in vars(module).items():
            if name in _SKIPPED:
                continue
            if value or not isinstance(value, dict):
                self.value(self._below(path, name), value, depth + 1)
            else:
                self._put(path, ())  # most hooks: an empty dictionary
        for name, child in module.named_children():
            self.value(self._below(path, name), child, depth)

    def _class(self, path: str, kind: type) -> None:
        """Functions that its forward may reach, by the names that they mention."""
        for owner in kind.__mro__:
            if owner is object or owner is nn.Module:
                continue
            functions = {n: _unwrap(f) for n, f in vars(owner).items()}
            self._put(path, tuple(Same(f) for f in functions.values() if isinstance(f, types.FunctionType)))
            if not owner.__module__.startswith("torch."):
                for name, function in functions.items():
                    if isinstance(function, types.FunctionType) and function.__code__.co_name != "__init__":
                        self.value(f"{path}.{name}", function, 1)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> None:
        self._put(path, Same(function.__code__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.value(self._below(path, "closure"), content, depth + 1)
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:  # themselves, not in a container made here: deep down they are known by their identity
                self.value(self._below(path, "defaults"), defaults, depth + 1)
        if depth <= _DEPTH and (function.__module__ or "").split(".")[0] not in _LIBRARIES:
            for name in names_of(function.__code__):
                if name in function.__globals__:
                    self._global(name, function.__globals__[name], depth + 1)

    def _global(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, type):
            self._put(name, Same(value))
        else:
            self.value(name, value, depth)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Every name that a function and the functions inside it may look up among the globals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


def _unwrap(member: Any) -> Any:
    """The function behind a property or a static method."""
    return getattr(member, "fget", None) or getattr(member, "__func__", None) or member


def _slots_of(kind: type) -> Iterable[str]:
    for owner in kind.__mro__:
        slots = getattr(owner, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def look(model: nn.Module, loss_fn: Callable[..., Any] | None, statics: Iterable[Any], *, named: bool = False) -> Walk:
    """Model, loss, and the arguments that are no tensors."""
    walk = Walk(named=named)
    walk.surroundings()
    walk.value("model", model)
    walk.value("loss_fn", loss_fn)
    for number, value in enumerate(statics):
        walk.value(f"argument {number}", value)
    return walk
