"""Random ops that draw from a given generator instead of the default one, with the very same numbers; and streams that are put back."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.torch_private.tensors import is_op, schema_of

_DROPOUT = torch.ops.aten.native_dropout.default


@functools.cache
def from_generator(target: Any) -> Callable[..., Any] | None:
    """`target` as a function of its own arguments and `generator=`; None for an op that only knows the default generator."""
    if target is _DROPOUT:
        return _drop
    if not is_op(target):
        return None
    names = _names(target)
    if "generator" in names:
        return _call_of(target)
    packet = target.overloadpacket
    for overload in map(functools.partial(getattr, packet), packet.overloads()):
        if "generator" in _names(overload) and [n for n in _names(overload) if n != "generator"] == names:
            return _call_of(overload)
    return None


def _names(target: Any) -> list[str]:
    return [a.name for a in schema_of(target).arguments]


def _call_of(target: Any) -> Callable[..., Any]:
    def call(*args: Any, generator: torch.Generator, **kwargs: Any) -> Any:
        kwargs.pop("generator", None)
        return target(*args, generator=generator, **kwargs)

    return call


def _drop(x: torch.Tensor, p: float, train: bool | None = True, *, generator: torch.Generator) -> Any:
    """What the kernels do: on a GPU one of them, on the CPU a mask, a product and a scale."""
    if train is False or not x.numel() or (x.is_cuda and p == 1):
        return _DROPOUT(x, p, train)
    if x.is_cuda:
        result, mask = torch.ops.aten._fused_dropout.default(x, 1.0 - p, generator=generator)
        return result, mask.view(torch.bool)
    kept = 1.0 - p
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(kept, generator=generator)
    return x.mul(mask.to(x.dtype).mul_(1.0 / kept if kept else 0.0)), mask


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Whatever is drawn inside, by anybody: the random numbers of Python, NumPy and torch go on as if nothing had been."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if arrays is not None:
                numpy.random.set_state(arrays)
