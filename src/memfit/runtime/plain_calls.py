"""While a fitted model is called, every fitted model that is reached from there is the plain one.

fitted(x) ── stepper ── plain model ── forward that a tool made from the fitted model's own ── fitted.forward: plain from here on
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Calls(threading.local):
    plain = False


_calls = _Calls()


def are_plain() -> bool:
    """Whether fitted models that this thread calls now stand for the plain ones."""
    return _calls.plain


@contextmanager
def made_plain() -> Iterator[None]:
    before, _calls.plain = _calls.plain, True
    try:
        yield
    finally:
        _calls.plain = before


class PlainCall:
    """The plain model's result for a call, apart from what made its inputs; `inputs` are the tensors that stand for them."""

    def __init__(self, stepper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepper, self._args, self._kwargs = stepper, args, kwargs
        self.inputs: tuple[torch.Tensor, ...] = ()

    def __call__(self) -> Any:
        call = self._stepper.flatten(self._args, self._kwargs)
        self.inputs = tuple(t.detach().requires_grad_(t.requires_grad) if t.requires_grad else t for t in call.tensors)
        return self._stepper.plain(*call.rebuild(self.inputs))
