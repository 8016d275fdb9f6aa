"""Stands beside memfit's own trace as Dynamo's guards stand before a frame: what the trace depended on, wrote to, and drew.

look       the fingerprint: part of what a plan is known by
planning   around the trace: Python state and random streams are put back, and what the plan would freeze is refused by name
begin      one more plan for a shape; too many in a row are refused by the name of what changed
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memfit.capture.guards.fingerprint import look
from memfit.capture.guards.turns import Turns
from memfit.capture.guards.written import Kept
from memfit.capture.inputs import Call
from memfit.core.errors import Unsupported
from memfit.core.recent import Recent


class Watch:
    """For one model and loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._turns: Recent[Turns] = Recent()
        self._last: Recent[dict[str, Any]] = Recent(1)

    def look(self, call: Call) -> tuple[Any, ...]:
        return tuple(look(self._model, self._loss_fn, call.static).found)

    def served(self, key: Any) -> None:
        turns = self._turns.find(key)
        if turns is not None:
            turns.served()

    def begin(self, key: Any, call: Call) -> None:
        walk = look(self._model, self._loss_fn, call.static, named=True)
        now = dict(zip(_distinct(walk.names), walk.found, strict=True))
        before = self._last.find(0) or now
        turns = self._turns.find(key) or self._turns.keep(key, Turns())
        turns.begin([name.partition(" #")[0] for name in now.keys() | before.keys() if now.get(name) != before.get(name)])
        self._last.keep(0, now)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around a trace and all that follows from it."""
        numpy: Any = sys.modules.get("numpy")
        kept, python, arrays = Kept(self._model), random.getstate(), _array_state(numpy)
        changed: list[str] = []
        drawn = ""
        try:
            yield
        finally:
            changed = kept.restore()
            drawn = "python" if random.getstate() != python else "numpy" if _differs(numpy, arrays) else ""
            random.setstate(python)
            if arrays is not None:
                numpy.random.set_state(arrays)
        if drawn:
            raise Unsupported(
                f"forward draws from {drawn}'s random numbers, and a plan would repeat those of its trace at every step: draw with torch, or outside."
            )
        if changed:
            raise Unsupported(
                f"forward writes to {', '.join(changed[:4])}, and Dynamo does not capture this model, so the plan could not repeat that: keep it in a buffer "
                "that is changed in place, or outside of forward."
            )


def _array_state(numpy: Any) -> Any:
    return None if numpy is None else numpy.random.get_state()


def _differs(numpy: Any, before: Any) -> bool:
    now = _array_state(numpy)
    return before is not None and any(not numpy.array_equal(a, b) for a, b in zip(now, before, strict=True))


def _distinct(names: list[str]) -> list[str]:
    return [f"{name} #{number}" for number, name in enumerate(names)]
