"""Outputs beside the loss that a step does not produce: what stands in for them computes them when somebody reads them.

    a budget that holds no logits ── logits are left out of the graph ── the loss may be done in chunks ── a stand-in is returned
    out.logits.shape, out[0], out.keys()        nothing is computed
    out.logits.argmax(-1), print, .numpy()      forward runs again, without gradients, with the random numbers of its step
    parameters changed since; a gradient        refused by name

The second forward is outside the budget. `fit(keep_outputs=True)` produces all outputs in the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from memfit.capture.captured import LeftOut, LeftOutObject
from memfit.core.errors import Unsupported
from memfit.runtime.plain_calls import made_plain
from memfit.runtime.rng import get_state, set_state
from memfit.runtime.versions import Versions
from memfit.torch_private.trees import map_inside, map_leaves
from memfit.torch_private.wrapper import make_wrapper, skip_torch_function

Make = Callable[[], torch.Tensor]


class Form(Protocol):
    """What a stand-in takes from the output, or from what describes it."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def stride(self) -> tuple[int, ...]: ...


_ASK = "fit the model with keep_outputs=True, which produces it in the step"
_STAYS = frozenset({torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.alias.default})
"""What a training framework does to outputs that nobody reads."""


class NotProduced(torch.Tensor):
    """Has the shape and type of an output, and `make` instead of values."""

    _make: Make
    _made: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: Form, make: Make) -> NotProduced:
        made: NotProduced = make_wrapper(cls, like.shape, like.stride(), like.dtype, like.device)
        made._make, made._made = make, None
        return made

    __torch_function__: Any = classmethod(skip_torch_function)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, options = args[0], dict(kwargs or {})
        if func in _STAYS and isinstance(given, NotProduced):
            like = func(
                torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta"), **{**options, **_on_meta(options)}
            )
            where = options.get("device") or given.device
            return NotProduced(LeftOut(like.shape, like.stride(), like.dtype, torch.device(where)), lambda: func(given.values(), **options))
        args, options = map_leaves(lambda x: x.values() if isinstance(x, NotProduced) else x, (args, options))
        return func(*args, **options)

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


def stand_in(like: Form, make: Make, loss: torch.Tensor) -> torch.Tensor:
    """For an output like this one, beside this loss."""
    tied: torch.Tensor = _Tie.apply(loss, NotProduced(like, make))
    return tied


class _Unread:
    """Goes for an object of another class, which is computed when anything is asked of it."""

    def __init__(self, kind: type, make: Callable[[], Any]) -> None:
        object.__setattr__(self, "_unread", [kind, make, None])

    def _values(self) -> Any:
        state: list[Any] = object.__getattribute__(self, "_unread")
        if state[2] is None:
            state[2] = state[1]()
        return state[2]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return object.__getattribute__(self, "_unread")[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(_Unread._values(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_Unread._values(self), name, value)

    def __len__(self) -> int:
        return len(_Unread._values(self))

    def __bool__(self) -> bool:
        return bool(_Unread._values(self))

    def __iter__(self) -> Any:
        return iter(_Unread._values(self))

    def __getitem__(self, key: Any) -> Any:
        return _Unread._values(self)[key]

    def __contains__(self, item: Any) -> bool:
        return item in _Unread._values(self)

    def __eq__(self, other: object) -> bool:
        return bool(_Unread._values(self) == other)

    def __hash__(self) -> int:
        return hash(_Unread._values(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_Unread._values(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Unread._values(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{object.__getattribute__(self, '_unread')[0].__name__}(computed when it is read)"


def stand_in_for_object(kind: type, make: Callable[[], Any], beside: torch.Tensor | None) -> Any:
    """For an output of this class that holds tensors. No gradient comes through them: where `beside` is given, it is refused."""

    def tie(t: torch.Tensor) -> torch.Tensor:
        if beside is None or not t.is_floating_point():
            return t
        return stand_in(t, t.detach, beside)

    return _Unread(kind, lambda: map_inside(make(), tie))


def refuse_late(name: str) -> Unsupported:
    """For an output that is read when it cannot be computed any more."""
    return Unsupported(
        f"an output beside the loss is read that this step did not produce, and {name} has changed since: read it before optimizer.step(), "
        f"or {_ASK}."
    )


class Later:
    """What is needed for that: the step's tensors, random numbers and surroundings, and `whole`, which gives all outputs.

    Made before forward runs, whose random numbers it keeps; asked for stand-ins after.
    """

    def __init__(self, model: nn.Module, sources: tuple[torch.Tensor, ...], shape: Any, whole: Callable[[], Sequence[Any]]) -> None:
        self._model, self._sources, self._shape, self._whole = model, sources, shape, whole
        self._captured = shape.ready.captured
        self._numbers = get_state(self._captured.device)
        self._versions: Versions | None = None

    def stand_in(self, output: int, like: Form | LeftOutObject, beside: torch.Tensor | None) -> Any:
        """In the place of an output, now that forward has run. A gradient that comes through it is refused where `beside` is used."""
        if self._versions is None:
            self._versions = Versions(self._captured, self._sources, ())
        versions = self._versions
        if isinstance(like, LeftOutObject):
            return stand_in_for_object(like.kind, lambda: self._compute(output, versions), beside)
        assert beside is not None
        self._shape.note("outputs beside the loss are left out, and computed when they are read: the budget does not hold them")
        return stand_in(like, lambda: self._compute(output, versions).detach(), beside)

    def _compute(self, output: int, versions: Versions) -> Any:
        changed = versions.find_changed_source()
        if changed is not None:
            raise refuse_late(self._captured.graph.tensors[self._captured.convention.sources[changed]].name)
        buffers = [self._sources[i] for i, _ in self._captured.convention.mutations]
        before, device = [b.detach().clone() for b in buffers], self._captured.device
        present = get_state(device)
        set_state(device, self._numbers)
        try:
            with self._shape.moment.again(self._model), torch.no_grad(), made_plain():
                return self._whole()[output]
        finally:
            set_state(device, present)
            for buffer, old in zip(buffers, before, strict=True):
                buffer.data.copy_(old)
