"""The state behind a fitted module: captured ways of the user's step, each behind its guards, by the shape of the call.

call ── shape ──> ways of this shape ── one whose guards hold? ── run it
                        │ none
                        ├─ a call of other sizes was captured: one capture for all sizes (`families.py`)
                        ├─ capture again (Dynamo, nothing of the user's runs), plan, run
                        └─ Dynamo refuses: memfit's own trace, whose plans are known by a fingerprint of what they depended on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.capture.guards.frame import Locals, capture_step, locals_of
from memfit.capture.guards.graph_model import GraphModel
from memfit.capture.guards.turns import Turns
from memfit.capture.inputs import Call
from memfit.core.errors import BadInput, InfeasibleBudget, NoPlanFound, Unsupported
from memfit.core.plan import Plan
from memfit.core.recent import Recent
from memfit.runtime.autograd_step import Ready
from memfit.runtime.closed_loop import Stepper
from memfit.runtime.cuda_graphs import Recorder
from memfit.runtime.families import Family
from memfit.runtime.graph_stepper import GraphStepper, Way
from memfit.runtime.report import Report
from memfit.torch_private.dynamo import NotCaptured
from memfit.torch_private.fake import leave_dispatch_modes
from memfit.torch_private.random_ops import keep_random_states
from memfit.torch_private.tensors import require_plain_autograd


@dataclass(slots=True)
class _Ways:
    """What is known about one shape of the call: its ways, the last used first, or why memfit traces it itself."""

    found: list[Way] = field(default_factory=list)
    refusal: str = ""
    turns: Turns = field(default_factory=Turns)


class Guarded:
    """`own` traces itself; `stepper_over` plans a captured graph. `leaves_open`: whether sizes that vary may be left open in a capture."""

    def __init__(
        self,
        own: Stepper,
        stepper_over: Callable[[GraphModel], GraphStepper],
        keep_outputs: bool | None = None,
        leaves_open: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.own, self._keep_outputs = own.model, own, keep_outputs
        self._stepper_over, self._leaves_open = stepper_over, leaves_open
        self._ways: Recent[_Ways] = Recent()
        self._families: Recent[Family] = Recent()
        self._latest: Stepper = own

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the fitted model. Without gradients the plain model runs: it holds no activations then."""
        if not torch.is_grad_enabled() or not self._wants_gradients(args, kwargs):
            return self.own.plain(args, kwargs)
        require_plain_autograd()
        ways, local, call = self._look(args, kwargs)
        with leave_dispatch_modes():
            way = self._serving(ways, local)
        if way is None:
            way = self._open(local, call)
        if way is None and not (ways.refusal and (not ways.found or self.own.knows(args, kwargs))):
            way = self._captured(ways, local, call)
        if way is None:
            self._latest = self.own
            return self.own.step(args, kwargs)
        result = way.step(local, call.tensors, lambda tensors: self.own.plain(*call.rebuild(tensors)))
        assert way.stepper is not None
        self._latest = way.stepper
        return result

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for a call like this one. Nothing of the user's runs where Dynamo captures the step."""
        ways, local, call = self._look(args, kwargs)
        way = self._captured(ways, local, call)
        if way is None:
            self._latest = self.own
            with keep_random_states():
                self.own.latest, _ = self.own.shape_of(args, kwargs)

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain model's result for this call, loss included."""
        return self.own.plain(args, kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Ways, Locals, Call]:
        own = self.own
        own.check_targets(args, kwargs)
        call = own.flatten(args, kwargs)
        ways = self._ways.find(call.shape_key())
        if ways is None:
            ways = _Ways()
        return ways, locals_of(self.model, own.loss_fn, own.num_targets, args, kwargs), call

    @staticmethod
    def _serving(ways: _Ways, local: Locals) -> Way | None:
        for position, way in enumerate(ways.found):
            if way.frame.serves(local):
                ways.turns.served()
                if position:
                    ways.found.insert(0, ways.found.pop(position))
                return way
        return None

    def _open(self, local: Locals, call: Call) -> Way | None:
        """A way that serves calls of many sizes, with a plan for this one; None where there is none, and none can be made."""
        family = self._families.find(call.open_key())
        if family is None:
            return None
        with leave_dispatch_modes():
            way = family.find(local, call.tensors)
        try:
            if way is not None:
                assert way.stepper is not None
                if not way.stepper.knows(call.tensors, {}):
                    self._prepare(way, local, call)
                return way
            varying = family.open_for(call.tensors) if self._leaves_open() else None
            if varying is None:
                return None
            with leave_dispatch_modes(), keep_random_states(), torch.enable_grad():
                frame = capture_step(local, call.tensors, varying)
            way = Way(frame, self.model, self._stepper_over, self._keep_outputs, varying)
            self._prepare(way, local, call)
        except (NotCaptured, Unsupported, BadInput):
            family.refusals += 1
            return None
        except (InfeasibleBudget, NoPlanFound):  # the next size may fit
            if way is not None and way not in family.found:
                family.keep(way)
            raise
        family.keep(way)
        return way

    def _captured(self, ways: _Ways, local: Locals, call: Call) -> Way | None:
        """A new way of the step, planned; None where memfit's own trace has to serve. Dynamo is asked once for what it refuses."""
        self._ways.keep(call.shape_key(), ways)
        last = ways.found[0].frame if ways.found else None
        ways.turns.begin(last.changes(local) if last else [], last.writes if last else [])
        try:
            with leave_dispatch_modes(), keep_random_states(), torch.enable_grad():
                frame = capture_step(local)
            way = Way(frame, self.model, self._stepper_over, self._keep_outputs)
            self._prepare(way, local, call)
        except (NotCaptured, Unsupported, BadInput) as error:
            ways.refusal = str(error)
            return None
        ways.found.insert(0, way)
        del ways.found[Turns.most :]
        if self._families.find(call.open_key()) is None:
            self._families.keep(call.open_key(), Family(tuple(t.shape for t in call.tensors)))
        return way

    def _prepare(self, way: Way, local: Locals, call: Call) -> None:
        """A plan of this way for this call."""
        for stepper in self._steppers():
            stepper.forget_recordings()  # their pools go back: planning measures, and the new plan needs the memory
        with leave_dispatch_modes(), keep_random_states(), torch.enable_grad():
            way.prepare(local, call.tensors)
        assert way.stepper is not None
        way.stepper.check, way.stepper.recorder = self.own.check, self.own.recorder
        self._latest = way.stepper

    def _wants_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(p.requires_grad for p in self.model.parameters()) or any(t.requires_grad for t in self.own.flatten(args, kwargs).tensors)

    def _steppers(self) -> list[Stepper]:
        kept: list[_Ways | Family] = [*self._ways.values(), *self._families.values()]
        return [self.own, *(way.stepper for ways in kept for way in ways.found if way.stepper is not None)]

    # -- settings: of all steppers behind it ----------------------------------------------------------------------

    @property
    def check(self) -> bool | str:
        return self.own.check

    @check.setter
    def check(self, check: bool | str) -> None:
        for stepper in self._steppers():
            stepper.check = check

    @property
    def recorder(self) -> Callable[[Ready], Recorder] | None:
        return self.own.recorder

    @recorder.setter
    def recorder(self, recorder: Callable[[Ready], Recorder] | None) -> None:
        for stepper in self._steppers():
            stepper.recorder = recorder

    # -- what users ask ------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Any:
        """The shape of the latest step."""
        return self._latest.latest

    def _current(self) -> Any:
        return self._latest._current()

    @property
    def plan(self) -> Plan:
        return self._latest.plan

    def report(self) -> Report:
        return replace(self._latest.report(), num_shapes=sum(len(stepper.shapes) for stepper in self._steppers()))
