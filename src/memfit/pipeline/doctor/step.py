"""The step as `fit` would plan it, and what was refused on the way: Dynamo's graph, with and without outputs beside the loss, or our own trace.

call ─ Dynamo ─┬─ graph ──────────────> forms, and forms without outputs beside the loss
               └─ refuses, and why ───> the same of memfit's own trace
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.guards.frame import GuardedFrame, capture_step, locals_of
from memfit.capture.guards.graph_model import GraphModel
from memfit.capture.inputs import Call
from memfit.core.errors import BadInput, Unsupported
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task
from memfit.runtime.gradients import are_there
from memfit.runtime.graph_stepper import Way
from memfit.torch_private.dynamo import NotCaptured
from memfit.torch_private.random_ops import keep_random_states


@dataclass(frozen=True, kw_only=True)
class Seen:
    """`fewer`: the forms without outputs beside the loss, where there are such outputs. `refusal`: why Dynamo has no graph."""

    whole: Forms
    fewer: Forms | None = None
    refusal: str = ""


def see_step(task: Task, call: Call) -> Seen:
    """Nothing of the user's runs where Dynamo captures the step, as in `fit`."""
    args, kwargs = call.rebuild(call.tensors)
    accumulates = are_there(tuple(task.model.parameters()))
    local = locals_of(task.model, task.loss_fn, task.num_targets, args, kwargs)
    try:
        with keep_random_states(), torch.enable_grad():
            frame = capture_step(local)
            whole = _forms_over(frame, task, local, call, keep_outputs=True, accumulates=accumulates)
            fewer = _forms_over(frame, task, local, call, keep_outputs=False, accumulates=accumulates)
            _ = whole.plain  # traced here: what `fit` cannot trace it traces itself
    except (NotCaptured, Unsupported, BadInput) as error:
        own = Forms(task, call, accumulates=accumulates)
        leaves_out = own.plain.has_outputs_beside_the_loss
        fewer = Forms(replace(task, keep_outputs=False), call, accumulates=accumulates)
        return Seen(whole=own, fewer=fewer if leaves_out else None, refusal=str(error))
    return Seen(whole=whole, fewer=fewer if _leaves_out(fewer) else None)


def _leaves_out(forms: Forms) -> bool:
    return isinstance(forms.task.model, GraphModel) and bool(forms.task.model.left_out)


def _forms_over(frame: GuardedFrame, task: Task, local: dict[str, Any], call: Call, *, keep_outputs: bool, accumulates: bool) -> Forms:
    """Of the captured graph, as a way of the step would plan it."""
    listener = _Listener()
    way = Way(frame, task.model, listener.listen, keep_outputs)
    way.prepare(local, call.tensors)
    assert listener.graph is not None
    assert listener.call is not None
    return Forms(replace(task, model=listener.graph, loss_fn=None, num_targets=0), listener.call, accumulates=accumulates)


class _Listener:
    """In the place of a stepper: hears of the graph and its inputs, and plans nothing."""

    def __init__(self) -> None:
        self.graph: GraphModel | None = None
        self.call: Call | None = None

    def listen(self, graph: GraphModel) -> Any:
        self.graph = graph
        return self

    @property
    def model(self) -> GraphModel | None:
        return self.graph

    def shape_of(self, inputs: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> tuple[None, tuple[torch.Tensor, ...]]:
        self.call = Call.flatten(inputs, kwargs)
        return None, ()
