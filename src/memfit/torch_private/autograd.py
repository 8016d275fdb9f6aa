"""What autograd keeps an eye on: version counters, and hooks that save tensors otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.torch_private.probe import Symbol

_VERSION = Symbol("torch.Tensor._version", "see a tensor changed between forward and backward")
_HOOKS = Symbol("torch._C._autograd._top_saved_tensors_default_hooks", "see a fitted model inside a checkpoint")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was changed in place, -1 where torch does not count (inference mode)."""
    _VERSION()
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [-1 if t.is_inference() else t._version for t in tensors]


def is_checkpointing() -> bool:
    """Whether this call stands inside `torch.utils.checkpoint` without reentry, which runs it again when backward comes."""
    hooks = _HOOKS()(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
