"""A step as one engine takes it, before any choice: traced, rewritten by the engine's passes over traced graphs, lowered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.capture.capture import Surroundings, Traced, lower_step, trace_step
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.passes.interface import Context
from memfit.passes.regions.compiler import Compiler
from memfit.passes.run import rewrite_traced


def engine_of(compiler: Compiler | None) -> str:
    """Whose line of `PIPELINE` it is."""
    return "eager" if compiler is None else "inductor"


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
    """`trace_for` and `lower_for` in one."""
    step = trace_for(compiler, model, call, loss_fn=loss_fn, num_targets=num_targets, training=training, gpu_attention=gpu_attention)
    return lower_for(compiler, step, Surroundings(optimizer=optimizer, accumulates=accumulates, reserve_bytes=reserve_bytes))


def trace_for(compiler: Compiler | None, model: nn.Module, call: Call, **how: Any) -> Traced:
    """Trace a step into the ops that a compiler takes, or without one into those that eager PyTorch runs."""
    return trace_step(model, call, decompositions=None if compiler is None else compiler.decompositions, **how)


def lower_for(compiler: Compiler | None, step: Traced, around: Surroundings) -> Captured:
    """Ready to plan. The compiler says the same about tracing as the one the step was traced for."""
    rewrite = partial(rewrite_traced, engine=engine_of(compiler), context=Context(compiler=compiler))
    return lower_step(step, rewrite, around, compiled=compiler is not None)
