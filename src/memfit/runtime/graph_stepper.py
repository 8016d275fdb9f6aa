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
from memfit.capture.guards.graph_model import Feed, GraphModel, Size, find_outputs_beside_the_loss
from memfit.core.errors import InfeasibleBudget, NoPlanFound, Unsupported
from memfit.core.recent import Recent
from memfit.runtime.autograd_step import Ready
from memfit.runtime.closed_loop import Preparer, Stepper
from memfit.runtime.gradients import are_there
from memfit.runtime.unread import Later
from memfit.torch_private.symbolic import Varying
from memfit.torch_private.trees import leaves_of, take_apart

Plain = Callable[[tuple[torch.Tensor, ...]], Any]
"""The plain model's result for a call with these tensors."""


_FEWEST_SIZES, _MOST_SIZES = 32, 256
_MOST_NODES = 40_000
"""Of all plans kept for a step whose sizes are open, counted in nodes of its graph: some hundred megabytes on the host."""
_COMPARED_SIZES = 3
"""Sizes of one open trace that are compared with the plain model, and measured in any case: the others run the same ops."""
_FAR = 1.25
"""Times the planned peak: a budget of as much is in no danger."""


class GraphStepper(Stepper):
    """A stepper whose model is a captured graph. Guards stand in front: of a call only the gradients that are there are looked at, and
    the sizes that the graph leaves open."""

    model: GraphModel

    def __init__(self, model: GraphModel, preparer: Preparer, *, check: bool | str) -> None:
        super().__init__(model, preparer, loss_fn=None, num_targets=0, check=check)
        self._compared_sizes = 0
        if model.varying:
            self.shapes = Recent(min(_MOST_SIZES, max(_FEWEST_SIZES, _MOST_NODES // model.num_nodes)))

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool, tuple[torch.Tensor, ...]]:
        parameters, buffers = self.model.tensors
        accumulates = are_there(parameters)
        sizes = tuple([args[i].shape for i in self.model.varying])
        return (accumulates, sizes), accumulates, (*parameters, *buffers, *args)

    def _will_check(self, shape: Any) -> bool:
        if self.check == "auto" and self._compared_sizes >= _COMPARED_SIZES:
            shape.note(f"first step not compared with the plain model: those of {_COMPARED_SIZES} other sizes of the same trace were")
            return False
        checks = super()._will_check(shape)
        self._compared_sizes += checks and bool(self.model.varying)
        return checks

    def _will_measure(self, shape: Any) -> bool:
        """Not where the measured peaks of other sizes were as planned and this one's is far below the budget: it would change nothing."""
        if not self.model.varying or self.check not in (True, False, "auto"):
            return True
        ready, budget = shape.ready, shape.budget_bytes
        far = budget is None or _FAR * _planned_bytes(ready) <= budget
        known = [s for s in self.shapes.values() if not s.tighter_by]
        as_planned = sum(s.measured_peak_bytes is not None and s.measured_peak_bytes <= _planned_bytes(s.ready) for s in known)
        return not far or as_planned < _COMPARED_SIZES

    def serves(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether the graph holds for tensors of these sizes."""
        holds = getattr(self.preparer, "holds", None)
        return holds is None or bool(holds(tensors))


def _planned_bytes(ready: Ready) -> int:
    return ready.plan.timeline.peak_bytes + ready.elsewhere_bytes


class _Prepared(Exception):
    """Ends the bytecode once the graph is planned: nothing of the user's runs after it."""


class Way:
    """A frame and the stepper over its graph, made at the first call, when parameters and inputs are there.

    `keep_outputs`: whether outputs beside the loss are produced; None where a budget holds them. `varying`: sizes of the call's tensors
    that the frame leaves open.
    """

    def __init__(
        self,
        frame: GuardedFrame,
        model: nn.Module,
        stepper_over: Callable[[GraphModel], GraphStepper],
        keep_outputs: bool | None = None,
        varying: Varying | None = None,
    ) -> None:
        self.frame, self.model, self._stepper_over, self._varying = frame, model, stepper_over, varying
        self._beside = frozenset() if keep_outputs or frame.writes else find_outputs_beside_the_loss(frame.captured.graph)
        self._tries_whole = keep_outputs is None
        self.stepper: GraphStepper | None = None
        self._call = frame.captured.bind(self._run_graph)
        self._now = threading.local()
        self.num_others = 0  # inputs of the graph that are neither the model's nor the call's: tensors that something else holds
        self._order: list[int] | None = None  # of the user's tensors, the one that is output k of the graph

    def serves(self, local: Mapping[str, Any], tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether all that this way depends on is as it was."""
        return self.frame.serves(local) and (self.stepper is None or self.stepper.serves(tensors))

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
        loss, samples = next(t for t in made if t.dim() == 0 and t.requires_grad), graph.samples_for(values)
        return graph.all_outputs(made, values, lambda k: later.stand_in(k, samples[k], loss))

    def _make_stepper(self, values: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...], left_out: frozenset[int]) -> GraphStepper:
        graph = GraphModel(self.frame.captured.graph, self._feeds(values, tensors), self.model, left_out, self._varying)
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

    def _feeds(self, values: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> list[Feed]:
        """Where each of the graph's inputs comes from: a parameter, a buffer, a tensor of the call, one of its sizes, or something else that
        is held elsewhere."""
        known: dict[int, str | int] = {id(t): k for k, t in reversed(list(enumerate(tensors)))}
        known.update({id(t): name for name, t in (*self.model.named_buffers(), *self.model.named_parameters())})
        others, names = iter(range(len(tensors), len(tensors) + len(values))), self.frame.captured.sources
        sizes = {
            f"{name}.size()[{dim}]": Size(known[id(v)], dim)  # type: ignore[arg-type]
            for name, v in zip(names, values, strict=True)
            if isinstance(v, torch.Tensor) and isinstance(known.get(id(v)), int)
            for dim in range(v.dim())
        }
        feeds: list[Feed] = []
        for name, value in zip(names, values, strict=True):
            if isinstance(value, torch.Tensor):
                feeds.append(known[id(value)] if id(value) in known else next(others))
            elif name in sizes:
                feeds.append(sizes[name])
            else:
                raise Unsupported(f"the step takes {name}, a number that is no size of an argument")
        return feeds

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
        return graph.run([self.inputs[f] if isinstance(f, int) else v for f, v in zip(graph.feeds, self._values, strict=True)])
