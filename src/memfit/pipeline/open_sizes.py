"""One step in all sizes of its inputs: traced once with the sizes left open, and planned for a size from what is known of others.

first call ── traced with open sizes, measured, planned
new size   ── numbers put in, lowered ── a known plan judged ── Ready        (milliseconds)
                                      └─ none fits: planned, with costs scaled from a measured size; measured if that is not enough
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any

import torch

from memfit.capture.capture import Traced, count_optimizer, lower_step
from memfit.capture.captured import Captured
from memfit.capture.guards.graph_model import GraphModel
from memfit.capture.inputs import Call
from memfit.capture.lower.optimizer_bytes import OptimizerBytes
from memfit.capture.trace.open_graph import OpenGraph
from memfit.core.errors import InfeasibleBudget, NoPlanFound, Unsupported
from memfit.passes.interface import Context
from memfit.passes.run import rewrite_traced
from memfit.pipeline.capture import trace_for
from memfit.pipeline.costs import Costed, cost
from memfit.pipeline.forms import Form, Forms, note_checkpoints, surroundings_of
from memfit.pipeline.known_plans import KnownPlans
from memfit.pipeline.prepare import Chosen, Order, Preparer, Price
from memfit.report.progress import Progress
from memfit.runtime.autograd_step import Ready
from memfit.runtime.cuda_graphs import Recorder

_REUSED = ("auto", "keep_all")
"""Planners that want nothing but a fast plan that fits: of others nobody knows why they plan as they do, and they are asked for each size."""


class OpenPreparer:
    """A `Preparer` for a graph over open sizes, on PyTorch's own kernels."""

    def __init__(self, preparer: Preparer, model: GraphModel) -> None:
        self._task = replace(preparer.task, model=model, loss_fn=None, num_targets=0, engine="eager", keep_outputs=True)
        self._preparer = replace(preparer, task=self._task)
        self._model = model
        self._graph: OpenGraph | None = None
        self._known: dict[bool, KnownPlans] = {}
        self._optimizer: OptimizerBytes | None = None
        self._lock = RLock()  # the graph is changed in place

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return self._preparer.flatten(args, kwargs)

    @property
    def recorder(self) -> Callable[[Ready], Recorder] | None:
        return self._preparer.recorder

    def holds(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether what the trace took for granted holds for a call with these tensors; before the first plan nobody knows."""
        return self._graph is None or self._graph.holds(tensors)

    def plan_for(self, call: Call, *, accumulates: bool, tighter_by: int, held_bytes: int = 0) -> Ready:
        """As `Preparer.plan_for`."""
        order = self._preparer.order(call, accumulates=accumulates, tighter_by=tighter_by, held_bytes=held_bytes)
        with self._lock, Progress("memfit") as progress:
            forms = Forms(self._task, call, accumulates=accumulates, lowered=self._lower(call, accumulates))
            known = self._known.setdefault(accumulates, KnownPlans())
            reuses = self._preparer.planner in _REUSED and not tighter_by
            chosen = known.find(self._task, order, forms) if reuses else None
            if chosen is None:
                chosen = self._seek(order, forms, known, progress, measures=tighter_by > 0)
        assert self._graph is not None
        ready, note = chosen.ready(), note_checkpoints(self._graph.num_checkpoints)
        return replace(ready, notes=(*ready.notes, note)) if note else ready

    def _lower(self, call: Call, accumulates: bool) -> Captured:
        if self._graph is None:
            self._graph = self._trace(call)
        step = Traced(model=self._model, call=call, joint=self._graph.at(call.tensors))
        around = surroundings_of(self._task, accumulates)
        if self._optimizer is None:
            self._optimizer = count_optimizer(step, around)
        return lower_step(step, _as_it_is, replace(around, counted=self._optimizer), compiled=False)

    def _trace(self, call: Call) -> OpenGraph:
        traced = trace_for(None, self._model, call, varying=self._model.varying)
        graph = OpenGraph(traced.joint, call.tensors)
        module = graph.at(call.tensors).module
        rewritten = rewrite_traced(module, engine="eager", context=Context(compiler=None))
        if [node.target for node in module.graph.nodes] != [node.target for node in rewritten.graph.nodes]:
            raise Unsupported("the traced step is rewritten for its sizes")
        return graph

    def _seek(self, order: Order, forms: Forms, known: KnownPlans, progress: Progress, *, measures: bool) -> Chosen:
        """A plan of this size's own, by costs that are scaled where that can be; a refusal is believed by measured ones only."""
        scaled: list[Form] = []

        def measure(form: Form) -> Costed:
            found = cost(form, self._task, progress)
            known.put_price(found)
            return found

        def price(form: Form) -> Costed:
            found = known.price(form)
            if found is None:
                return measure(form)
            scaled.append(form)
            return found

        try:
            chosen = self._choose(order, forms, progress, measure if measures else price)
        except (InfeasibleBudget, NoPlanFound):
            if not scaled:
                raise
            chosen = self._choose(order, forms, progress, measure)
        if not measures:
            known.remember(chosen, next(forms.usual()).key)
        return chosen

    def _choose(self, order: Order, forms: Forms, progress: Progress, price: Price) -> Chosen:
        return self._preparer.choose(self._task, order, forms, progress, price)


def _as_it_is(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return module
