"""Outputs beside the loss that a step does not produce: what stands in for them computes them when somebody reads them.

    a budget that holds no logits ── logits are left out of the graph ── the loss may be done in chunks ── a stand-in is returned
    out.logits.shape, out[0], out.keys()        nothing is computed
    out.logits.argmax(-1), print, .numpy()      forward runs again, without gradients, with the random numbers of its step
    parameters changed since; a gradient        refused by name

The second forward is outside the budget. `fit(keep_outputs=True)` produces all outputs in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.core.errors import Unsupported
from memfit.torch_private.trees import map_leaves
from memfit.torch_private.wrapper import make_wrapper, skip_torch_function

Make = Callable[[], torch.Tensor]
_ASK = "fit the model with keep_outputs=True, which produces it in the step"
_STAYS = frozenset({torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.alias.default})
"""What a training framework does to outputs that nobody reads."""


class NotProduced(torch.Tensor):
    """Has the shape and type of an output, and `make` instead of values."""

    _make: Make
    _made: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, make: Make) -> NotProduced:
        made: NotProduced = make_wrapper(cls, like.shape, like.stride(), like.dtype, like.device)
        made._make, made._made = make, None
        return made

    __torch_function__: Any = classmethod(skip_torch_function)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args[0]
        if func in _STAYS and isinstance(given, NotProduced):
            like = func(
                torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta"), **{**kwargs, **_on_meta(kwargs)}
            )
            where = kwargs.get("device") or given.device
            return NotProduced(_Like(like, where), lambda: func(given.values(), **kwargs))  # type: ignore[arg-type]
        args, kwargs = map_leaves(lambda x: x.values() if isinstance(x, NotProduced) else x, (args, kwargs))
        return func(*args, **kwargs)

    def values(self) -> torch.Tensor:
        """The output itself, computed at the first call."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.values().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.values().tolist()

    def item(self) -> Any:
        return self.values().item()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.values().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NotProduced(shape={tuple(self.shape)}, dtype={self.dtype}, computed when it is read)"


class _Like:
    """What a wrapper takes from a tensor, on another device."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self.shape, self.dtype, self.device, self._strides = like.shape, like.dtype, device, like.stride()

    def stride(self) -> tuple[int, ...]:
        return self._strides


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": "meta"} if "device" in kwargs else {}


class _Tie(torch.autograd.Function):
    """Hangs a stand-in on the loss: without it a gradient that comes through the output would be lost without a word."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        return stand_in.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(f"a gradient came through an output beside the loss, which this step did not produce: {_ASK}.")


def stand_in(like: torch.Tensor, make: Make, loss: torch.Tensor) -> torch.Tensor:
    """For an output like this one, beside this loss."""
    tied: torch.Tensor = _Tie.apply(loss, NotProduced(like, make))
    return tied


def refuse_late(name: str) -> Unsupported:
    """For an output that is read when it cannot be computed any more."""
    return Unsupported(
        f"an output beside the loss is read that this step did not produce, and {name} has changed since: read it before optimizer.step(), "
        f"or {_ASK}."
    )
