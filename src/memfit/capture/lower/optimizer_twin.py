"""A stand-in for the user's optimizer that can be stepped without anybody noticing.

    optimizer ── state, groups, own attributes ──> twin of the same class over fake tensors
        └── step put on the instance (schedulers, scalers), step hooks ──> left behind: they lead back to the real one

Where in the flow: `optimizer_bytes` steps the twin and counts what that takes. A wrapper is copied together with the optimizer
inside it; what a tool puts around an optimizer without a memory of its own (accelerate, Lightning) is taken off first.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memfit.torch_private.fake import is_fake, leave_modes

_TOOLS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SHARED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    str,
    bytes,
    int,
    float,
    complex,
)


def unwrap(optimizer: Any) -> Any:
    """The optimizer itself, without what a training tool puts around it to count or to skip its steps."""
    while type(optimizer).__module__.partition(".")[0] in _TOOLS:
        inner = next((v for v in vars(optimizer).values() if is_optimizer(v)), None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def is_optimizer(value: Any) -> bool:
    """An optimizer of torch, or something with the same face, as wrappers for mixed precision have."""
    return isinstance(value, torch.optim.Optimizer) or (
        not isinstance(value, type) and hasattr(value, "param_groups") and callable(getattr(value, "step", None))
    )


@contextmanager
def left_as_it_is(optimizer: Any) -> Iterator[None]:
    """Whatever happens inside, the optimizer and those inside it have their attributes, groups and state back at the end."""
    found = [o for o in (optimizer, *vars(optimizer).values()) if is_optimizer(o)]
    before = [(vars(o), dict(vars(o))) for o in found]
    entries = [(e, dict(e)) for o in found for e in (o.state, *o.state.values(), *o.param_groups) if isinstance(e, dict)]
    lists = [(g["params"], list(g["params"])) for o in found for g in o.param_groups]
    try:
        yield
    finally:
        for mapping, kept in (*before, *entries):
            if mapping.keys() != kept.keys() or any(mapping[k] is not v for k, v in kept.items()):
                mapping.clear()
                mapping.update(kept)
        for held, values in lists:
            held[:] = values


class Twins:
    """Copies values that hang together: what was one object before is one after, and every tensor is a fake one."""

    def __init__(self, optimizer: Any, device: str | None) -> None:
        self.real, self.device = optimizer, device
        self.made: dict[int, Any] = {}
        self.originals: list[Any] = []  # kept, so that no other object gets the number of one that was copied
        self.counters_move = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)

    def optimizer(self) -> Any:
        """The twin, with a gradient on every parameter that requires one, and without state so far."""
        for group in self.real.param_groups:
            for parameter in group["params"]:
                self._parameter(parameter)
        return self.copy(self.real)

    def carry_state(self) -> None:
        """What the optimizers hold already: some make it in their constructor and look for it in a step."""
        for real, twin in [(o, self.made[id(o)]) for o in self.originals if is_optimizer(o)]:
            if "state" in vars(real):
                vars(twin)["state"].update({self.copy(key): self.copy(value) for key, value in real.state.items()})

    def copy(self, value: Any) -> Any:
        if value is None or isinstance(value, _SHARED):
            return value
        if id(value) not in self.made:
            self.originals.append(value)
            self._make(value)
        return self.made[id(value)]

    def _make(self, value: Any) -> None:
        """The copy is known before its parts are copied: they may lead back to it."""
        if isinstance(value, torch.Tensor):
            self.made[id(value)] = self._fake(value)
        elif is_optimizer(value):
            self._make_optimizer(value)
        elif isinstance(value, (dict, list, set, deque)):
            made = self.made[id(value)] = copy.copy(value)
            made.clear()
            _fill(made, value, self.copy)
        elif isinstance(value, tuple):
            parts = [self.copy(v) for v in value]
            self.made[id(value)] = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        elif isinstance(value, types.MethodType):
            self.made[id(value)] = types.MethodType(value.__func__, self.copy(value.__self__))
        elif isinstance(value, functools.partial):
            parts = [self.copy(v) for v in value.args]
            self.made[id(value)] = functools.partial(self.copy(value.func), *parts, **self.copy(value.keywords))
        else:
            self._make_object(value)

    def _make_optimizer(self, real: Any) -> None:
        kind: Any = type(real)
        twin = self.made[id(real)] = kind.__new__(kind)
        for name, value in vars(real).items():
            if name == "state":
                twin.__dict__[name] = copy.copy(value)
                twin.__dict__[name].clear()
            elif name in _STEP_HOOKS:
                twin.__dict__[name] = OrderedDict()
            elif not (callable(value) and hasattr(kind, name)):  # a step put on the instance is bound to the real optimizer
                twin.__dict__[name] = self.copy(value)

    def _make_object(self, value: Any) -> None:
        """Any other object: one of its own where Python can copy it, else itself."""
        try:
            made = copy.copy(value) if hasattr(value, "__dict__") else value
        except Exception:
            made = value
        self.made[id(value)] = made
        if made is not value:
            for name, part in vars(value).items():
                made.__dict__[name] = self.copy(part)

    def _parameter(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self.made:
            return
        self.originals.append(parameter)
        fake = parameter if is_fake(parameter) and self.device is None else torch.empty_like(parameter, device=self._place(parameter))
        fake = torch.nn.Parameter(fake.detach(), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            fake.grad = torch.empty_like(fake)
        self.made[id(parameter)] = fake

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers, which steps ask for, keep their value."""
        if tensor.dim() or tensor.device.type == "meta" or is_fake(tensor):
            return torch.empty_like(tensor, device=self._place(tensor), requires_grad=False)
        with leave_modes():
            number = tensor.item()
        return torch.tensor(number, dtype=tensor.dtype, device=self._place(tensor) if self.counters_move else tensor.device)

    def _place(self, tensor: torch.Tensor) -> str | torch.device:
        if self.device is not None:
            return self.device
        return "cpu" if tensor.device.type == "meta" else tensor.device


def _fill(made: Any, value: Any, copied: Any) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            made[copied(key)] = copied(part)
    elif isinstance(value, set):
        made.update(copied(part) for part in value)
    else:
        made.extend(copied(part) for part in value)
