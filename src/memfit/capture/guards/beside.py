"""What Dynamo does not guard, looked at beside its guards: functions of classes, hooks on all modules, patched functions of torch, the
environment, the default type, and the sign of zeros."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from memfit.torch_private.dynamo import CapturedFrame, guards_see_parameters
from memfit.torch_private.tensors import global_module_hooks

_ENVIRONMENT = frozenset({"environ", "getenv", "environb"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Each field is what was found when the step was captured."""

    classes: tuple[tuple[type, tuple[Any, ...]], ...]
    functions: tuple[tuple[Any, str, Any], ...]
    hooks: tuple[Any, ...]
    environment: dict[str, str] | None
    dtype: torch.dtype
    parameters: tuple[tuple[int, bool], ...] | None
    zeros: tuple[tuple[CodeType, float], ...]

    @classmethod
    def around(cls, local: Mapping[str, Any], captured: CapturedFrame) -> Beside:
        reads = any(_ENVIRONMENT.intersection(code.co_names) and "importlib" not in code.co_filename for code in captured.codes)
        return cls(
            classes=tuple((c, functions_of(c)) for c in classes_of(local)),
            functions=tuple(find_functions(captured.graph)),
            hooks=global_module_hooks(),
            environment=dict(os.environ) if reads else None,
            dtype=torch.get_default_dtype(),
            parameters=None if guards_see_parameters() else parameters_of(local),
            zeros=tuple(zeros_of(captured, local)),
        )

    def unchanged(self, local: Mapping[str, Any]) -> bool:
        return (
            self.hooks == global_module_hooks()
            and self.dtype == torch.get_default_dtype()
            and all(functions_of(c) == found for c, found in self.classes)
            and all(getattr(owner, name, None) is target for owner, name, target in self.functions)
            and (self.parameters is None or self.parameters == parameters_of(local))
            and (self.environment is None or self.environment == dict(os.environ))
            and (not self.zeros or self._signs_hold(local))
        )

    def changes(self, local: Mapping[str, Any]) -> list[str]:
        found = [f"functions of class {c.__name__}" for c, functions in self.classes if functions_of(c) != functions]
        found += [f"{getattr(o, '__name__', o)}.{name}" for o, name, target in self.functions if getattr(o, name, None) is not target]
        found += ["hooks on all modules"] if self.hooks != global_module_hooks() else []
        found += [f"default dtype {self.dtype}"] if self.dtype != torch.get_default_dtype() else []
        found += ["parameters"] if self.parameters is not None and self.parameters != parameters_of(local) else []
        now = dict(os.environ)
        names = (
            sorted({k for k in {*now, *self.environment} if now.get(k) != self.environment.get(k)}) if self.environment is not None else []
        )
        found += [f"environment variable {name}" for name in names]
        return found + ([] if self._signs_hold(local) else ["the sign of a zero"])

    def _signs_hold(self, local: Mapping[str, Any]) -> bool:
        return all(math.copysign(1.0, eval(code, {"L": local})) == sign for code, sign in self.zeros)


def classes_of(local: Mapping[str, Any]) -> list[type]:
    """Classes whose functions the step may run: of the modules, and of the loss."""
    loss_fn = local["loss_fn"]
    modules: Iterable[Any] = (*local["model"].modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else [loss_fn]))
    found = {c for kind in {type(m) for m in modules} for c in kind.__mro__ if c is not object and c is not FunctionType}
    return sorted(found, key=lambda c: (c.__module__, c.__qualname__))


def parameters_of(local: Mapping[str, Any]) -> tuple[tuple[int, bool], ...]:
    """Of each place of a parameter, the first place that holds the same tensor, and whether that wants gradients."""
    places: dict[int, int] = {}
    every = local["model"].named_parameters(remove_duplicate=False)
    return tuple((places.setdefault(id(p), number), p.requires_grad) for number, (_, p) in enumerate(every))


def functions_of(kind: type) -> tuple[Any, ...]:
    """A class's own functions and properties, and the code of functions: what changes when a method is patched."""
    return tuple(v.__code__ if type(v) is FunctionType else v for v in vars(kind).values() if type(v) in (FunctionType, property))


def find_functions(graph: torch.fx.GraphModule) -> Iterable[tuple[Any, str, Any]]:
    """Functions of torch that the graph calls, where they are looked up: somebody may patch one later."""
    seen = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in seen:
            continue
        seen.add(node.target)
        name = getattr(node.target, "__name__", "")
        for owner in (torch, torch.nn.functional):
            if name and getattr(owner, name, None) is node.target:
                yield owner, name, node.target


def zeros_of(captured: CapturedFrame, local: Mapping[str, Any]) -> Iterable[tuple[CodeType, float]]:
    """What was compared with a zero: == says nothing about its sign."""
    for name in captured.zeros:
        code = compile(name, "guard", "eval")
        yield code, math.copysign(1.0, eval(code, {"L": local}))
