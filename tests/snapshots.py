"""Everything of a training loop that planning must leave alone, as values that can be compared."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def snapshot(*objects: Any) -> dict[str, Any]:
    """The objects (models, optimizers, schedulers, scalers) with all they hold, and what is global: random streams, autocast, types."""
    seen: dict[int, Any] = {}
    return {
        "objects": [describe(o, seen) for o in objects],
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "cache": torch.is_autocast_cache_enabled(),
        "default": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
    }


def describe(value: Any, seen: dict[int, Any]) -> Any:
    """Values, types and identities of everything reachable through attributes and containers."""
    if isinstance(value, (int, float, str, bytes, bool, type(None), type)):
        return value
    if id(value) in seen:
        return ("again", id(value))
    seen[id(value)] = value
    inner = _inside(value, seen)
    return (type(value).__name__, id(value), inner)


def _inside(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        hooks = len(value._backward_hooks or ())
        gradient = describe(value.grad, seen) if value.is_leaf else None
        return (type(value), str(value.dtype), value.requires_grad, value._version, value.detach().tolist(), gradient, hooks)
    if isinstance(value, Mapping):
        return [(describe(k, seen), describe(v, seen)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [describe(v, seen) for v in value]
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, nn.Module)) or type(value).__module__.startswith(
        ("accelerate.", "tests.", "torch.amp", "test_")
    ):
        return describe(vars(value), seen)
    return repr(value)
