"""Situations of arguments that are no tensors: each kind of value, passed at first, and then another one of its kind, a new equal one, or
the same object changed inside."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.parts.guards.changes import Change
from benchmarks.parts.guards.subjects import Case, Config, Mlp, Way, make_case


class Plain:
    def __init__(self, gain: float) -> None:
        self.gain = gain


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


@dataclass(frozen=True)
class Frozen:
    gain: float


class Asks(Mlp):
    """Reads its second argument, whatever it is."""

    def forward(self, x: Tensor, option: Any = None) -> Tensor:
        return super().forward(x) * gain_of(option)


def gain_of(option: Any) -> Any:
    if option is None:
        return 0.5
    if isinstance(option, enum.Enum):
        return float(option.value)
    if isinstance(option, (bool, int, float)):
        return (2.0 if str(option).startswith("-") else 1.0) + option
    if isinstance(option, str):
        return float(len(option))
    if isinstance(option, (list, tuple)):
        return float(sum(option))
    if isinstance(option, dict):
        return float(option["gain"])
    if isinstance(option, np.ndarray):
        return float(option.sum())
    if callable(option):
        return option(1.0)
    return option.gain


_VALUES: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]], Callable[[Any], Any] | None]] = {
    "float": (lambda: 1.5, [lambda: 2.5, lambda: 1.5, lambda: float("inf")], None),
    "zero": (lambda: 0.0, [lambda: -0.0], None),
    "int": (lambda: 1, [lambda: 2, lambda: True, lambda: 1.0], None),
    "bool": (lambda: True, [lambda: False, lambda: 1], None),
    "text": (lambda: "ab", [lambda: "abc", lambda: "".join(["a", "b"])], None),
    "None": (lambda: None, [lambda: 1.0], None),
    "enum": (lambda: Way.SUM, [lambda: Way.MEAN], None),
    "list": (lambda: [1.0, 2.0], [lambda: [1.0, 3.0], lambda: [1.0, 2.0], lambda: [1.0]], lambda v: v.append(1.0)),
    "tuple": (lambda: (1.0, 2.0), [lambda: (1.0, 3.0), lambda: (1.0, 2.0)], None),
    "dict": (lambda: {"gain": 1.0}, [lambda: {"gain": 2.0}, lambda: {"gain": 1.0}], lambda v: v.update(gain=3.0)),
    "namespace": (lambda: types.SimpleNamespace(gain=1.0), [lambda: types.SimpleNamespace(gain=2.0)], lambda v: setattr(v, "gain", 3.0)),
    "object": (lambda: Plain(1.0), [lambda: Plain(2.0), lambda: Plain(1.0)], lambda v: setattr(v, "gain", 3.0)),
    "slots": (lambda: Slotted(1.0), [lambda: Slotted(2.0), lambda: Slotted(1.0)], lambda v: setattr(v, "gain", 3.0)),
    "dataclass": (lambda: Config(gain=1.0), [lambda: Config(gain=2.0), lambda: Config(gain=1.0)], lambda v: setattr(v, "gain", 3.0)),
    "frozen dataclass": (lambda: Frozen(1.0), [lambda: Frozen(2.0), lambda: Frozen(1.0)], None),
    "array": (lambda: np.ones(2), [lambda: np.zeros(2), lambda: np.ones(2)], lambda v: v.__setitem__(0, 3.0)),
    "function": (lambda: lambda v: v, [lambda: lambda v: v * 2], None),
}


def argument_situations() -> Iterator[tuple[str, Callable[[], Case], Change]]:
    """(label, how the case is made, what is changed)."""
    for label, (make, others, inside) in _VALUES.items():

        def case(make: Callable[[], Any] = make) -> Case:
            base = make_case("mlp")
            model: nn.Module = Asks()
            model.load_state_dict(base.model.state_dict())
            return Case(model=model, loss_fn=base.loss_fn, batch=base.batch, weight=base.weight, extra=[make()])

        for number, new in enumerate(others):
            yield f"argument {label}", case, Change(name=f"another, {number}", apply=lambda c, r, n=new: c.extra.__setitem__(0, n()))
        if inside is not None:
            yield f"argument {label}", case, Change(name="changed inside", apply=lambda c, r, i=inside: i(c.extra[0]) and None)
