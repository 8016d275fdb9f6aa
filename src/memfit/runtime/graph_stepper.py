"""One captured way of the step: guards in front, Dynamo's bytecode around, and a stepper in the place of the graph.

locals ── guards hold? ── bytecode ──> graph inputs ──> GraphStepper ── plan ──> graph outputs ──> bytecode ──> the user's result
                                                                                                  (and what forward writes to)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.guards.frame import GuardedFrame
from memfit.capture.guards.graph_model import GraphModel, find_outputs_beside_the_loss
from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.runtime.closed_loop import Stepper
from memfit.runtime.gradients import are_there
from memfit.runtime.later import Later
from memfit.torch_private.trees import leaves_of, take_apart

Plain = Callable[[tuple[torch.Tensor, ...]], Any]
"""The plain model's result for a call with these tensors."""


class GraphStepper(Stepper):
    """A stepper whose model is a captured graph. Guards stand in front: of a call only the gradients that are there are looked at."""

    model: GraphModel

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool, tuple[torch.Tensor, ...]]:
        parameters, buffers = self.model.tensors
        accumulates = are_there(parameters)
        return accumulates, accumulates, (*parameters, *buffers, *args)


class _Prepared(Exception):
    """Ends the bytecode once the graph is planned: nothing of the user's runs after it."""


class Way:
    """A frame and the stepper over its graph, made at the first call, when parameters and inputs are there.

    `keep_outputs`: whether outputs beside the loss are produced; None where a budget holds them.
    """

    def __init__(
        self,
        frame: GuardedFrame,
        model: nn.Module,
        stepper_over: Callable[[GraphModel], GraphStepper],
        keep_outputs: bool | None = None,
    ) -> None:
        self.frame, self.model, self._stepper_over = frame, model, stepper_over
        self._beside = frozenset() if keep_outputs or frame.writes else find_outputs_beside_the_loss(frame.captured.graph)
        self._tries_whole = keep_outputs is None
        self.stepper: GraphStepper | None = None
        self._call = frame.captured.bind(self._run_graph)
        self._now = threading.local()
        self.num_others = 0  # inputs of the graph that are neither the model's nor the call's: tensors that something else holds
        self._order: list[int] | None = None  # of the user's tensors, the one that is output k of the graph

    def prepare(self, local: Mapping[str, Any], tensors: tuple[torch.Tensor, ...]) -> None:
        """Plan without running: the bytecode is left as soon as it calls the graph."""
        self._now.tensors, self._now.plain = tensors, None
        try:
            self._call(**local)
        except _Prepared:
            pass
        finally:
            self._now.__dict__.clear()

    def step(self, local: Mapping[str, Any], tensors: tuple[torch.Tensor, ...], plain: Plain) -> Any:
        self._now.tensors, self._now.plain = tensors, plain
        try:
            result = self._call(**local)
            if self._order is None:
                self._order = self._find_order(result)
            return result
        finally:
            self._now.__dict__.clear()

    def _run_graph(self, *values: torch.Tensor) -> tuple[Any, ...]:
        tensors, plain = self._now.tensors, self._now.plain
        if self.stepper is None:
            left_out = frozenset[int]() if self._tries_whole else self._beside
            self.stepper = self._make_stepper(values, tensors, left_out)
        self.stepper.model.take(values, self.model)
        feeds = self.stepper.model.feeds
        others = [v for f, v in zip(feeds, values, strict=True) if isinstance(f, int) and f >= len(tensors)]
        inputs, self.num_others = (*tensors, *others), len(others)
        shape, sources = self._shape_of(inputs, values, tensors)
        if plain is None:
            self.stepper.latest = shape
            raise _Prepared
        graph = self.stepper.model
        if not any(s.requires_grad for s in sources):
            self._now.made = whole = graph.run_whole(values)
            return whole
        later = Later(self.model, sources, shape, lambda: graph.run_whole(values)) if graph.left_out else None
        made: Any = self.stepper.run_planned(shape, sources, PlainWay(self, values, inputs, plain))
        self._now.made = made
        if later is None:
            return graph.all_outputs(made, values)
        loss, samples = next(t for t in made if t.dim() == 0 and t.requires_grad), graph.samples
        return graph.all_outputs(made, values, lambda k: later.stand_in(k, samples[k], loss))

    def _make_stepper(self, values: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...], left_out: frozenset[int]) -> GraphStepper:
        graph = GraphModel(self.frame.captured.graph, self._feeds(values, tensors), self.model, left_out)
        stepper = self._stepper_over(graph)
        stepper.subject = self.model
        return stepper

    def _shape_of(
        self, inputs: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...]
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """With all outputs; where no plan holds them, without those beside the loss, from then on."""
        stepper = self.stepper
        assert stepper is not None
        if stepper.model.left_out or not self._beside:
            return stepper.shape_of(inputs, {})
        try:
            return stepper.shape_of(inputs, {})
        except (InfeasibleBudget, NoPlanFound):
            fewer = self._make_stepper(values, tensors, self._beside)
        fewer.check, fewer.recorder = stepper.check, stepper.recorder
        shape, sources = fewer.shape_of(inputs, {})
        self.stepper, self._order = fewer, None
        return shape, sources

    def _feeds(self, values: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...]) -> list[str | int]:
        """Where each of the graph's inputs comes from: a parameter, a buffer, a tensor of the call, or something else that is held elsewhere."""
        known: dict[int, str | int] = {id(t): k for k, t in reversed(list(enumerate(tensors)))}
        known.update({id(t): name for name, t in (*self.model.named_buffers(), *self.model.named_parameters())})
        others = iter(range(len(tensors), len(tensors) + len(values)))
        return [known[id(v)] if id(v) in known else next(others) for v in values]

    def _find_order(self, result: Any) -> list[int]:
        """Empty where some output of the graph is not among what the user gets."""
        leaves = {id(t): j for j, t in enumerate(t for t in leaves_of(take_apart(result)) if isinstance(t, torch.Tensor))}
        made = self._now.made
        return [leaves[id(t)] for t in made] if all(id(t) in leaves for t in made) else []

    @property
    def can_run_plain(self) -> bool:
        """Whether the user's own model gives what the graph gives, and may be run again without anybody seeing it."""
        return bool(self._order) and not self.frame.writes

    def outputs_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        """The graph's outputs among what the user's model gives."""
        leaves = [t for t in leaves_of(take_apart(result)) if isinstance(t, torch.Tensor)]
        return tuple(leaves[j] for j in self._order or ())


class PlainWay:
    """For the check of the first step: the user's own model, or the graph where running the model twice would be seen.

    `inputs` are the tensors that stand for the call's, apart from what made them.
    """

    def __init__(self, way: Way, values: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], plain: Plain) -> None:
        self._way, self._values, self._given, self._plain = way, values, inputs, plain
        self.inputs: tuple[torch.Tensor, ...] = ()

    def __call__(self) -> Any:
        way, given = self._way, self._given
        assert way.stepper is not None
        count = len(self._given) - way.num_others
        self.inputs = (*(t.detach().requires_grad_() if t.requires_grad else t for t in given[:count]), *given[count:])
        if way.can_run_plain:
            return way.outputs_of(self._plain(self.inputs[:count]))
        graph = way.stepper.model
        return graph.run([v if isinstance(f, str) else self.inputs[f] for f, v in zip(graph.feeds, self._values, strict=True)])
