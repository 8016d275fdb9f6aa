"""Branches that look like they depend on data but do not: `if (position_ids.diff() == 1).all()` over an arange.

While a model is traced its tensors have no values. This mode computes alongside, for real, what follows from constants
alone (arange, ones, full, ... and functions of them, while small), and answers `.item()` and `bool()` from there. It also
knows that `torch.rand([]) < 0` is false: the layer drop of many transformers, switched off. Anything that depends on an
input or a parameter is left alone and refused later, by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from memfit.torch_private.fake import leave_modes
from memfit.torch_private.trees import leaves_of, map_leaves

_MAX_ELEMENTS = 1 << 20
_MAKERS = {torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.linspace, torch.eye}
_ANSWERS = {torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.tolist}
_BELOW = {torch.Tensor.lt, torch.Tensor.__lt__, torch.lt}


class KnownConstants(TorchFunctionMode):
    """Answers for tensors whose values follow from constants."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()  # by identity: == on tensors is an op
        self.uniform: Any = WeakIdKeyDictionary()  # drawn from [0, 1), not changed since

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # .shape and the like: most calls, and never a new value
            return func(*args, **kwargs)
        if func in _ANSWERS and isinstance(args[0], torch.Tensor) and args[0] in self.known:
            return _really(func, (self.known[args[0]],), {})
        result = func(*args, **kwargs)
        tensors = [t for t in leaves_of((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")) or "out" in kwargs:
            for tensor in tensors:
                self.known.pop(tensor, None)  # written in place: its value is no longer what we computed
                self.uniform.pop(tensor, None)
        elif func is torch.rand:
            self.uniform[result] = True
        elif func in _BELOW and args[0] in self.uniform and isinstance(args[1], (int, float)) and args[1] <= 0:
            self._learn(result, torch.zeros, (tuple(result.shape),), {"dtype": torch.bool})
        elif isinstance(result, torch.Tensor) and result.numel() <= _MAX_ELEMENTS and self._follows(func, tensors):
            self._learn(result, func, args, kwargs)
        return result

    def _follows(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        return all(t in self.known for t in tensors) if tensors else func in _MAKERS

    def _learn(self, result: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        real_args, real_kwargs = map_leaves(lambda x: self.known[x] if isinstance(x, torch.Tensor) else x, (args, kwargs))
        try:
            value = _really(func, real_args, real_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return  # not computable outside the trace: simply not known
        if isinstance(value, torch.Tensor) and value.shape == result.shape:
            self.known[result] = value


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    with leave_modes(), torch.no_grad():
        return func(*args, **kwargs)
