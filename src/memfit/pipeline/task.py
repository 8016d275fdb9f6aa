"""What to train: a model, what surrounds its step, and the engine that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memfit.capture.inputs import Call, Inputs
from memfit.core.errors import BadInput
from memfit.planning.jit.warm_up import start_compiling

DEFAULT_ALLOW = ("recompute", "variants")


@dataclass(frozen=True, kw_only=True)
class Other:
    """A model that lives beside the one that is fitted, and its optimizer if it is trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None

    @property
    def trained(self) -> list[torch.Tensor]:
        """Parameters that get gradients; those of the optimizer, frozen for now or not."""
        if self.optimizer is not None:
            return [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in self.model.parameters() if p.requires_grad]

    @staticmethod
    def of(given: Any) -> Other:
        model, optimizer = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if not isinstance(model, nn.Module) or not (optimizer is None or hasattr(optimizer, "param_groups")):
            raise BadInput(f"others has a {type(given).__name__}: give models, or (model, optimizer) pairs.")
        return Other(model=model, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class Task:
    """`engine`: "eager" runs PyTorch's own kernels, "inductor" compiled regions; "auto" compiles on CUDA what is large enough.

    `device` names one that is planned for and need not be here. `keep_outputs`: whether outputs beside the loss are produced; None where a
    budget holds them. `others` have their place in the budget too.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None
    num_targets: int = 0
    optimizer: torch.optim.Optimizer | None = None
    reserve_bytes: int = 0
    device: str | None = None
    allow: tuple[str, ...] = DEFAULT_ALLOW
    engine: str = "eager"
    keep_outputs: bool | None = True
    others: tuple[Other, ...] = ()

    @cached_property
    def compiles(self) -> bool:
        """Whether steps are to be compiled: asked for, or on a GPU that is here."""
        return self.engine == "inductor" or (
            self.engine == "auto" and self.device is None and any(p.is_cuda for p in self.model.parameters())
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the costs are for a named GPU while the model is not on one."""
        return self.device not in (None, "cpu") and not any(p.is_cuda for p in self.model.parameters())

    @property
    def has_variants(self) -> bool:
        return "variants" in self.allow


def task_and_call(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    example_targets: Any,
    optimizer: Any,
    device: str | None,
    reserve: int = 0,
) -> tuple[Task, Call]:
    """What fit, estimate and frontier share: the arguments checked and put together."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is a {type(model).__name__}, not an nn.Module.")
    inputs = Inputs.of(example_inputs)
    targets = tuple(example_targets) if isinstance(example_targets, (tuple, list)) else (example_targets,)
    if targets and loss_fn is None:
        raise BadInput("example_targets are given without loss_fn: pass loss_fn=..., or leave the targets out.")
    task = Task(model=model, loss_fn=loss_fn, num_targets=len(targets), optimizer=optimizer, reserve_bytes=reserve, device=device)
    return task, Call.flatten((*inputs.args, *targets), inputs.kwargs)


def compile_planner_meanwhile(task: Task) -> None:
    """On a machine that never planned; not where ops are timed on the cores that would compile."""
    if task.device is not None or all(p.device.type != "cpu" for p in task.model.parameters()):
        start_compiling()
