"""`torch.compile(model, backend="memfit", options={"budget": "6GiB"})`: the ecosystem's own door.

Dynamo hands over each graph it captures; parameters come as arguments. They are put back on a module, so that the same
stepper runs them: one plan per shape, gradients into .grad as they appear. A graph break gives several graphs, each planned
inside the same budget on its own; none sees the others' activations, so a model without breaks is what to aim for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.api import stepper_for
from memfit.core.errors import BadInput
from memfit.torch_private import trace
from memfit.torch_private.dynamo import on_skipped_loop

_OPTIONS = ("budget", "reserve", "planner", "time_limit_s", "check", "optimizer", "engine", "allow", "replay")


def memfit_backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **settings: Any) -> Callable[..., Any]:
    """A Dynamo backend. `options` takes budget (needed), reserve, planner, time_limit_s, check, optimizer, engine, allow and replay."""
    options = dict(settings.get("options") or {})
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown or "budget" not in options:
        what = f"option {unknown[0]!r} is not known" if unknown else "no budget is given"
        raise BadInput(
            f'backend "memfit": {what}: torch.compile(model, backend="memfit", options={{"budget": "6GiB"}}) takes {", ".join(_OPTIONS)}.'
        )
    compiled: Callable[..., Any] = torch.compiler.disable(_Lazy(graph, options))
    return compiled


def register_backend() -> None:
    """Make backend="memfit" known to torch.compile where memfit is not installed as a package (an entry point does it there).

    Calling it twice does nothing more.
    """
    trace.register_backend("memfit", memfit_backend)


def warn_of_loop(place: str) -> None:
    """Say that torch leaves a function to eager, where its budget is nobody's."""
    warnings.warn(
        f'torch.compile(backend="memfit") plans nothing of {place or "a function"}: it has a graph break inside a loop, so torch runs it as it is, '
        "outside of any budget. TORCH_LOGS=graph_breaks names the break; move it out of the loop.",
        stacklevel=2,
    )


on_skipped_loop(memfit_backend, warn_of_loop)


class _Lazy:
    """Plans at the first call, when the real parameters are there."""

    def __init__(self, graph: torch.fx.GraphModule, options: dict[str, Any]) -> None:
        self.graph, self.options = graph, options
        self.stepper: Any = None
        self.holder: _Holder | None = None

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.graph(*args)
        if self.holder is None:
            self.holder = _Holder(self.graph, args)
            self.stepper = stepper_for(self.holder, self.options)
        self.holder.take(args)
        return self.stepper.step(self.holder.inputs(args), {})


class _Holder(nn.Module):
    """Dynamo's graph with its parameter arguments held as parameters."""

    def __init__(self, graph: torch.fx.GraphModule, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._plain = (graph,)
        self._slots = [i for i, a in enumerate(args) if isinstance(a, nn.Parameter)]
        self.take(args)

    def take(self, args: tuple[Any, ...]) -> None:
        for i in self._slots:
            self.register_parameter(f"p{i}", args[i])

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a for i, a in enumerate(args) if i not in set(self._slots))

    def forward(self, *inputs: Any) -> Any:
        feed = iter(inputs)
        held = set(self._slots)
        count = len(self._slots) + len(inputs)
        return self._plain[0](*(getattr(self, f"p{i}") if i in held else next(feed) for i in range(count)))
