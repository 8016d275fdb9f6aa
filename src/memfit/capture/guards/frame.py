"""The user's step as one captured frame, with a check of all that the capture depended on.

serves(locals)  =  Dynamo's guards hold  and  what Dynamo does not guard is as it was (`beside.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from memfit.capture.guards.beside import Beside
from memfit.torch_private.checkpoints import cuts_gradients, is_tagged
from memfit.torch_private.dynamo import CapturedFrame, NotCaptured, capture_frame
from memfit.torch_private.symbolic import Varying, marked_as_varying

_MANY_MODULES = 150  # from here on the guards trust versions of dictionaries: walking all of them would take 1 % of a 10 ms step
Locals = dict[str, Any]


def run_step(model: Any, loss_fn: Any, args: Any, kwargs: Any, targets: Any) -> Any:
    """What is captured."""
    out = model(*args, **kwargs)
    return out if loss_fn is None else loss_fn(out, *targets)


def locals_of(
    model: nn.Module, loss_fn: Callable[..., Any] | None, num_targets: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Locals:
    """The arguments of `run_step` for one call of the fitted model."""
    cut = len(args) - num_targets
    return {"model": model, "loss_fn": loss_fn, "args": tuple(args[:cut]), "kwargs": kwargs, "targets": tuple(args[cut:])}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedFrame:
    """`writes` are the user's objects that the step changes: its bytecode repeats that, so it must not be run for its result alone."""

    captured: CapturedFrame
    beside: Beside
    writes: tuple[str, ...]

    def serves(self, local: Mapping[str, Any]) -> bool:
        return self.captured.serves(local) and self.beside.unchanged(local)

    def changes(self, local: Mapping[str, Any]) -> list[str]:
        """What is other than it was, in words."""
        return self.captured.changes(local) or self.beside.changes(local)


def capture_step(local: Locals, tensors: Sequence[torch.Tensor] = (), varying: Varying | None = None) -> GuardedFrame:
    """Raises NotCaptured where Dynamo has no single graph for the step. `varying`: sizes of the call's `tensors` to leave open."""
    model = cast(nn.Module, local["model"])
    many = sum(1 for _ in model.modules()) >= _MANY_MODULES
    with marked_as_varying(tensors, varying or {}):
        captured = capture_frame(cast(FunctionType, run_step), local, fast_check=many)
    if "random" in captured.effects:
        raise NotCaptured("random numbers of Python are drawn")
    sources = dict(zip(captured.graph.graph.find_nodes(op="placeholder"), captured.sources, strict=True))
    if any(is_tagged(node) and cuts_gradients(node, sources) for node in captured.graph.graph.nodes):
        raise NotCaptured("a reentrant torch.utils.checkpoint is handed nothing that wants a gradient, and gives none to what is inside it")
    writes = tuple(effect for effect in captured.effects if effect.startswith("L["))
    return GuardedFrame(captured=captured, beside=Beside.around(local, captured), writes=writes)
