"""`capture`: a model, how it is called, and what surrounds it -> Captured; in two halves where several forms are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.capture.lower.lower import Setting, lower
from memfit.capture.lower.optimizer_bytes import optimizer_bytes
from memfit.capture.lower.storages import CUDA_GRANULARITY
from memfit.capture.trace.joint_graph import Joint, Manner, trace
from memfit.passes.fx.cudnn_batch_norm import use_cudnn_batch_norm
from memfit.passes.fx.fuse_counters import count_together
from memfit.passes.fx.max_pool_gradient import gathered
from memfit.passes.fx.relu_before_pool import mask_before_pools
from memfit.passes.fx.split_projections import projections_apart
from memfit.passes.regions.compiler import Compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced step, from which several forms are made: tracing is the slow part."""

    model: nn.Module
    call: Call
    joint: Joint

    def captured(
        self,
        compiler: Compiler | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        accumulates: bool = False,
        reserve_bytes: int = 0,
        target: str | None = None,
    ) -> Captured:
        """Ready to plan. `compiler` is one that says the same about tracing as the one the step was traced for; `target` the kind of
        device the optimizer will step on, where that is not the model's own."""
        joint = replace(self.joint, module=_copied(self.joint.module))
        if compiler is None:
            use_cudnn_batch_norm(joint.module)
        else:
            joint = replace(joint, module=compiler.improve(joint.module))
            gathered(joint.module)
            mask_before_pools(joint.module)
            projections_apart(joint.module)
            count_together(joint.module)
        model, call = self.model, self.call
        sources = (*model.parameters(), *model.buffers(), *call.tensors)
        granularity = CUDA_GRANULARITY if any(t.device.type == "cuda" for t in sources) else 1
        names = (
            *(n for n, _ in model.named_parameters()),
            *(n for n, _ in model.named_buffers()),
            *(f"input {i}" for i in range(len(call.tensors))),
        )
        setting = Setting(
            sources=sources,
            names=names,
            reserve_bytes=reserve_bytes,
            accumulates=accumulates,
            optimizer=optimizer_bytes(optimizer, granularity=granularity, device=target) if optimizer is not None else None,
        )
        return replace(lower(joint, setting), compiled=compiler is not None)


def traced(
    model: nn.Module,
    call: Call,
    *,
    loss_fn: Callable[..., Any] | None = None,
    num_targets: int = 0,
    training: bool = True,
    gpu_attention: bool = False,
    compiler: Compiler | None = None,
) -> Traced:
    """Trace one training step (or, with `training=False`, one inference) on fake tensors. Allocates nothing.

    With a `compiler` into the ops that it takes, ready for `regions.with_regions`; else into those that eager PyTorch runs.
    """
    table = None if compiler is None else compiler.decompositions()
    manner = Manner(training=training, gpu_attention=gpu_attention, decompositions=table)
    return Traced(model=model, call=call, joint=trace(model, call, loss_fn=loss_fn, num_targets=num_targets, manner=manner))


def capture(
    model: nn.Module,
    call: Call,
    *,
    loss_fn: Callable[..., Any] | None = None,
    num_targets: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    accumulates: bool = False,
    reserve_bytes: int = 0,
    training: bool = True,
    gpu_attention: bool = False,
    compiler: Compiler | None = None,
) -> Captured:
    """`traced` and `Traced.captured` in one."""
    step = traced(model, call, loss_fn=loss_fn, num_targets=num_targets, training=training, gpu_attention=gpu_attention, compiler=compiler)
    return step.captured(compiler, optimizer=optimizer, accumulates=accumulates, reserve_bytes=reserve_bytes)


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Passes change a graph in place. Nodes are new, what they describe is shared."""
    graph = torch.fx.Graph()
    result = graph.graph_copy(module.graph, {})
    (before,) = module.graph.find_nodes(op="output")
    graph.output(result).meta = dict(before.meta)
    return torch.fx.GraphModule(module, graph)
