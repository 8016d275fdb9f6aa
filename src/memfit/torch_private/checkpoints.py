"""`torch.utils.checkpoint` inside a model, left out: what to keep and what to compute again is for the plan to say.

checkpoint(block, x)            runs block(x) while a step is traced, or compared with its plan
tag_activation_checkpoint(...)  is what Dynamo writes for it into its graph: run as the graph inside it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.probe import Symbol, is_tested

_NEED = "leave out checkpoints that are in the model"
_CHECKPOINTS = Symbol("torch.utils.checkpoint", _NEED)
_REENTRANT = Symbol("torch.utils.checkpoint.CheckpointFunction", _NEED)
_AROUND = Symbol("torch.utils.checkpoint._checkpoint_without_reentrant_generator", _NEED)
_TAGGED = Symbol("torch._higher_order_ops.wrap.tag_activation_checkpoint", _NEED)


@contextmanager
def checkpoints_left_out() -> Iterator[list[str]]:
    """Inside it a checkpoint runs its function and keeps what that keeps. The list gets an entry for each that was met.

    Also where the plain model is run to compare: a reentrant one has gradients only for `backward()`, and Dynamo's node, run as it is, draws
    other random numbers the second time.
    """
    met: list[str] = []
    if not is_tested():
        yield met
        return
    _AROUND()

    def around(*_: Any, **__: Any) -> Iterator[None]:
        met.append("without reentry")
        yield

    patches = (Patch(_CHECKPOINTS(), "_checkpoint_without_reentrant_generator", around), _run_reentrant(lambda: met.append("reentrant")))
    with patch_torch(_NEED, *patches):
        yield met


def _run_reentrant(meet: Callable[[], None]) -> Patch:
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        meet()
        trains = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):  # else it gives no gradients to what is inside it either
            return function(*args)

    return Patch(_REENTRANT(), "apply", staticmethod(apply))


def is_tagged(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is a checkpoint: its first argument is the graph inside it, the others are that one's inputs."""
    return node.op == "call_function" and node.target is _TAGGED()


def cuts_gradients(node: torch.fx.Node, inputs: dict[torch.fx.Node, str]) -> bool:
    """Whether a checkpoint, being reentrant, gives no gradients to what is inside it: nothing that is handed to it wants one. `inputs`: where
    those of the graph come from; parameters are not handed to it, though Dynamo lists them."""
    handed = [a for a in node.args[1:] if isinstance(a, torch.fx.Node) and "_parameters" not in inputs.get(a, "")]
    return bool(node.kwargs.get("use_reentrant", True)) and not any(_trains(a) for a in handed)


def _trains(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad
