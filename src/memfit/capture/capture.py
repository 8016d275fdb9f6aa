"""A model, how it is called, and what surrounds it -> Captured; in two halves, the second of which is done for each form.

model, call ─ trace_step ─> Traced ─ lower_step: rewritten by what it is handed (the FX passes), then lowered ─> Captured
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.capture.lower.lower import Setting, lower
from memfit.capture.lower.optimizer_bytes import OptimizerBytes, optimizer_bytes
from memfit.capture.lower.storages import CUDA_GRANULARITY
from memfit.capture.trace.joint_graph import Joint, Manner, trace
from memfit.torch_private.symbolic import Varying

Rewrite = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced step, from which several forms are made: tracing is the slow part."""

    model: nn.Module
    call: Call
    joint: Joint


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What stands around the step: bytes left for a loss outside, gradients that are there already, the optimizer's step.

    `target`: the kind of device the optimizer will step on, where that is not the model's own. `counted`: the optimizer's bytes, where
    somebody has counted them already, which takes a tenth of a second.
    """

    optimizer: torch.optim.Optimizer | None = None
    counted: OptimizerBytes | None = None
    accumulates: bool = False
    reserve_bytes: int = 0
    target: str | None = None


def trace_step(
    model: nn.Module,
    call: Call,
    *,
    loss_fn: Callable[..., Any] | None = None,
    num_targets: int = 0,
    training: bool = True,
    gpu_attention: bool = False,
    loss_only: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    varying: Varying | None = None,
) -> Traced:
    """Trace one training step (or, with `training=False`, one inference) on fake tensors. Allocates nothing.

    With a compiler's `decompositions` into the ops that it takes; without into those that eager PyTorch runs. `loss_only`: outputs beside
    the loss are left out. `varying`: sizes of inputs that are left open.
    """
    manner = Manner(training=training, gpu_attention=gpu_attention, loss_only=loss_only, decompositions=decompositions, varying=varying)
    return Traced(model=model, call=call, joint=trace(model, call, loss_fn=loss_fn, num_targets=num_targets, manner=manner))


def count_optimizer(step: Traced, around: Surroundings) -> OptimizerBytes | None:
    """What the optimizer holds beside this step."""
    if around.optimizer is None:
        return None
    sources = (*step.model.parameters(), *step.model.buffers(), *step.call.tensors)
    granularity = CUDA_GRANULARITY if any(t.device.type == "cuda" for t in sources) else 1
    return optimizer_bytes(around.optimizer, granularity=granularity, device=around.target)


def lower_step(step: Traced, rewrite: Rewrite, around: Surroundings, *, compiled: bool) -> Captured:
    """Ready to plan. `rewrite` makes the graph to lower from the traced one, which stays; `compiled`: traced for a compiler."""
    model, call = step.model, step.call
    sources = (*model.parameters(), *model.buffers(), *call.tensors)
    names = (
        *(n for n, _ in model.named_parameters()),
        *(n for n, _ in model.named_buffers()),
        *(f"input {i}" for i in range(len(call.tensors))),
    )
    setting = Setting(
        sources=sources,
        names=names,
        reserve_bytes=around.reserve_bytes,
        accumulates=around.accumulates,
        optimizer=around.counted or count_optimizer(step, around),
    )
    return replace(lower(replace(step.joint, module=rewrite(step.joint.module)), setting), compiled=compiled)
