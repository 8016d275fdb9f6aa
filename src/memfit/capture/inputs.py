"""How a model is called: example inputs as people give them, flattened to tensors and a recipe to rebuild the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.guards.values import is_plain, value_key
from memfit.core.errors import BadInput
from memfit.torch_private.trees import flatten, unflatten


class Inputs:
    """Positional and keyword arguments together: `memfit.Inputs(x, mask=m)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    @staticmethod
    def of(example: Any) -> Inputs:
        """A tuple or list is positional, a mapping is keywords, a single tensor is one argument."""
        if isinstance(example, Inputs):
            return example
        if isinstance(example, Mapping):
            return Inputs(**{str(k): v for k, v in example.items()})
        if isinstance(example, (tuple, list)):
            return Inputs(*example)
        if isinstance(example, torch.Tensor):
            return Inputs(example)
        raise BadInput(
            f"example_inputs is a {type(example).__name__}: give a tuple (positional), a dict (keywords) or memfit.Inputs(*args, **kwargs)."
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A flattened call. `tensors` are the tensor leaves in order; `static` holds the other leaves, None where a tensor goes."""

    tensors: tuple[torch.Tensor, ...]
    static: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    spec: Any  # how the leaves are nested

    @staticmethod
    def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = flatten((args, kwargs))
        is_tensor = tuple(isinstance(x, torch.Tensor) for x in leaves)
        static = tuple(None if t else x for x, t in zip(leaves, is_tensor, strict=True))
        return Call(tuple(x for x, t in zip(leaves, is_tensor, strict=True) if t), static, is_tensor, spec)

    def rebuild(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors in place of the example's."""
        feed = iter(tensors)
        leaves = [next(feed) if t else x for x, t in zip(self.static, self.is_tensor, strict=True)]
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs

    def key(self) -> tuple[Any, ...]:
        """Equal for calls that one plan can serve: same structure, shapes, layouts, types and plain values."""
        return (self._shapes(), tuple(map(value_key, self.static)), str(self.spec))

    def shape_key(self) -> tuple[Any, ...]:
        """Like `key`, with nothing but the type of objects whose values the guards of a captured step look at."""
        return (self._shapes(), tuple(value_key(v) if is_plain(v) else type(v) for v in self.static), str(self.spec))

    def open_key(self) -> tuple[Any, ...]:
        """Like `shape_key`, for calls that differ in nothing but sizes of their tensors."""
        tensors = tuple((t.dim(), t.is_contiguous(), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        return (tensors, *self.shape_key()[1:])

    def _shapes(self) -> tuple[Any, ...]:
        return tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in self.tensors)
