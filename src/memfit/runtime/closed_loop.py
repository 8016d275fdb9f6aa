"""Runs a fitted model's steps: one plan per shape, a checked first step, and a closed loop on measured bytes.

call -> key -> Ready (planned once) -> Session -> backward -> measured against predicted -> tighter plan on a miss
                                    -> Replayed, if asked for, once the first steps went well
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from memfit.core.errors import BadInput, MemfitError, Unsupported
from memfit.core.plan import Plan
from memfit.core.recent import Recent
from memfit.core.units import format_bytes
from memfit.runtime.autograd_step import Ready, Session, Step, run, source_bytes
from memfit.runtime.check import EVERY_STEP, CannotJudge, Verdict, compare
from memfit.runtime.cuda_graphs import Recorder, Recording, Replayed
from memfit.runtime.free_memory import free_bytes
from memfit.runtime.gradients import GradientSink, Tangents, are_there, count_left
from memfit.runtime.moment import Moment
from memfit.runtime.plain_calls import PlainCall
from memfit.runtime.report import Report
from memfit.runtime.unread import Later
from memfit.runtime.watches import Comparison, Look, Trial
from memfit.torch_private.buckets import count_bucket_bytes
from memfit.torch_private.fake import fakes_like
from memfit.torch_private.tensors import has_gradient_hooks, own_tensors
from memfit.torch_private.trees import leaves_of, take_apart

_KNOWN_AFTER = 3  # steps: one recorded, one at planned offsets, one to see what outlived it
_RESERVED_REPLANS = 2
_OOM_REPLANS = 3
_MOST_RECORDINGS = 4  # parameters that lie elsewhere at every step are not worth it


class Watched(Protocol):
    """What else a plan depends on, where nobody else guards it; and a limit to how often it may change."""

    def look(self, call: Any) -> Any: ...

    def begin(self, key: Any, call: Any) -> None: ...

    def planning(self) -> AbstractContextManager[None]: ...

    def served(self, key: Any) -> None: ...


class Preparer(Protocol):
    """What makes steps for a stepper: `pipeline.prepare.Preparer`."""

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call as its tensors, `.tensors`, and what tells one plan from another, `.key()`."""
        ...

    def plan_for(self, call: Any, *, accumulates: bool, tighter_by: int, held_bytes: int) -> Ready:
        """A call captured, planned and generated, `tighter_by` bytes below the budget."""
        ...

    @property
    def recorder(self) -> Callable[[Ready], Recorder] | None:
        """What records steps in CUDA graphs; None where they are called."""
        ...


@dataclass(slots=True)
class _Shape:
    """What is known about one shape: its plan, and how the first step went."""

    ready: Ready
    prepare: Callable[[int], Ready]
    moment: Moment
    tighter_by: int = 0
    measured_peak_bytes: int | None = None
    verdict: Verdict | None = None  # the worst, where several steps were compared
    compared_steps: int = 0
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    oom_replans: int = 0
    reserved_replans: int = 0
    recording: Recording | None = None
    recordings_left: int = _MOST_RECORDINGS

    def settle_layouts(self, ready: Ready) -> None:
        """After a whole step of this plan, if it is still the one."""
        if self.ready is ready:
            self.ready = ready.settle_layouts()

    def note(self, text: str) -> None:
        """For the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def check_sentence(self) -> str:
        if self.verdict is None:
            return "not run"
        return self.verdict.sentence() + (f", in each of {self.compared_steps} steps" if self.compared_steps > 1 else "")

    @property
    def budget_bytes(self) -> int | None:
        """The budget the user gave: the plan's own, and what was set aside from it."""
        ready = self.ready
        planned = ready.plan.budget.device_bytes
        return None if planned is None else planned + self.tighter_by + ready.elsewhere_bytes + ready.margin_bytes


class Stepper:
    """The state behind a fitted module."""

    def __init__(
        self,
        model: nn.Module,
        preparer: Preparer,
        *,
        loss_fn: Callable[..., Any] | None,
        num_targets: int,
        check: bool | str,
        watched: Watched | None = None,
    ) -> None:
        self.model, self.preparer, self.loss_fn, self.num_targets, self.check = model, preparer, loss_fn, num_targets, check
        self.flatten, self.recorder, self.watched = preparer.flatten, preparer.recorder, watched
        self.shapes: Recent[_Shape] = Recent()
        self.latest: _Shape | None = None
        self.subject = model  # whose training flags a plan depends on

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the fitted model. Without gradients the plain model runs: it holds no activations then."""
        if not torch.is_grad_enabled() or not self._wants_gradients(args, kwargs):
            return self.plain(args, kwargs)
        try:
            shape, sources = self.shape_of(args, kwargs)
        except Unsupported:
            self.raise_own_error(args, kwargs)
            raise
        later = None
        if shape.ready.captured.leaves_out:
            later = Later(self.subject, sources, shape, lambda: leaves_of(take_apart(self.plain(args, kwargs))))
        return self.run_planned(shape, sources, PlainCall(self, args, kwargs), later)

    def run_planned(self, shape: _Shape, sources: tuple[torch.Tensor, ...], plain: Callable[[], Any], later: Later | None = None) -> Any:
        """The step by its plan; the first one of a shape is compared with what `plain` gives. `later` computes what the plan leaves out."""
        self.latest = shape
        if shape.steps == _KNOWN_AFTER:
            self._hold_reserved(shape)
        session = self._replayed(shape, sources) or self._called(shape, sources, plain)
        shape.steps += 1
        return run(session, later.stand_in if later is not None else None)

    def _called(self, shape: _Shape, sources: tuple[torch.Tensor, ...], plain: Callable[[], Any]) -> Session:
        session = Session(shape.ready, sources, trial=shape.steps == 0, replan=lambda ready: self._after_oom(shape, ready))
        if session.trial:
            shape.ready.make_room()
            session.compares, measures = self._will_check(shape), self._will_measure(shape)
            if session.compares or measures:
                session.watch = Trial(self, shape, plain, measures=measures)
            elif shape.ready.layouts is not None:
                session.watch = Look(shape)
        elif self.check == EVERY_STEP and self._will_check(shape):
            session.compares, session.watch = True, Comparison(self, shape, plain)
        elif shape.ready.layouts is not None:
            session.watch = Look(shape)
        return session

    def _replayed(self, shape: _Shape, sources: tuple[torch.Tensor, ...]) -> Step | None:
        """A step from the shape's recording, made now if it is time; None where it has none or the last replay's results are in use."""
        not_yet = shape.steps <= _KNOWN_AFTER or shape.ready.captured.accumulates
        if self.recorder is None or not_yet or self.check == EVERY_STEP:
            return None
        if shape.recording is None or not shape.recording.serves(sources):
            self.forget_recordings()
            if not shape.recordings_left:
                return None
            shape.recordings_left -= 1
            try:
                shape.recording = Recording(shape.ready, sources, self.recorder(shape.ready))
            except (RuntimeError, MemfitError) as error:
                shape.recordings_left = 0
                shape.notes.append(f"not replayed: {error}")
                return None
            shape.notes.append(str(shape.recording))
        return Replayed(shape.recording, sources) if shape.recording.is_free else None

    def forget_recordings(self) -> None:
        """Their pools go back: whatever runs next needs the memory."""
        for shape in self.shapes.values():
            shape.recording = None

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain model's result for this call, loss included; without gradients and targets, its predictions."""
        if self.loss_fn is None or (not torch.is_grad_enabled() and self._lacks_targets(args, kwargs)):
            return self.model(*args, **kwargs)
        self.check_targets(args, kwargs)
        cut = len(args) - self.num_targets
        return self.loss_fn(self.model(*args[:cut], **kwargs), *args[cut:])

    def raise_own_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call that the plain model refuses too (a wrong shape, say) gives the model's own error. Leaves no trace."""
        before = [b.detach().clone() for b in self.model.buffers()]
        with torch.random.fork_rng(), torch.no_grad():
            try:
                self.plain(args, kwargs)
            finally:
                for buffer, old in zip(self.model.buffers(), before, strict=True):
                    buffer.data.copy_(old)

    def shape_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Shape, tuple[torch.Tensor, ...]]:
        """The plan for this call, made now if it is new, and the step's source tensors."""
        self.check_targets(args, kwargs)
        known_by, accumulates, sources = self.look(args, kwargs)
        left_bytes = count_left(sources)
        held_bytes = count_bucket_bytes() + left_bytes
        shape = self.shapes.find((known_by, held_bytes))
        if shape is None:
            if self.watched is not None:
                self.watched.begin(known_by[0], self.flatten(args, kwargs))
            self.forget_recordings()
            again = self.flatten(*fakes_like((args, kwargs)))  # to plan a second time: the tensors themselves are the caller's
            moment = Moment.now(self.subject, sources[0].device if sources else torch.device("cpu"))

            def prepare(tighter_by: int) -> Ready:
                with moment.again(self.subject), torch.enable_grad():
                    return self.preparer.plan_for(again, accumulates=accumulates, tighter_by=tighter_by, held_bytes=held_bytes)

            with self.watched.planning() if self.watched is not None else nullcontext():
                ready = self.preparer.plan_for(self.flatten(args, kwargs), accumulates=accumulates, tighter_by=0, held_bytes=held_bytes)
            new = _Shape(ready=ready, prepare=prepare, moment=moment, notes=[*ready.notes])
            if left_bytes:
                new.note(f"frozen parameters hold gradients of {format_bytes(left_bytes)}: setting their .grad to None gives them back")
            shape = self.shapes.keep((known_by, held_bytes), new)
        elif self.watched is not None:
            self.watched.served(known_by[0])
        return shape, sources

    def knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call has a plan already."""
        known_by, _, sources = self.look(args, kwargs)
        return self.shapes.find((known_by, count_bucket_bytes() + count_left(sources))) is not None

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool, tuple[torch.Tensor, ...]]:
        """What the plan for this call is known by, whether gradients are there already, and the step's source tensors."""
        call = self.flatten(args, kwargs)
        parameters, buffers, training = _parts_of(self.model)
        accumulates = are_there(parameters)
        around = self.watched.look(call) if self.watched is not None else None
        key = ((call.key(), accumulates, training, _mode_of(parameters)), around)
        return key, accumulates, (*parameters, *buffers, *call.tensors)

    def _wants_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(p.requires_grad for p in self.model.parameters()) or any(t.requires_grad for t in self.flatten(args, kwargs).tensors)

    def check_targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.loss_fn is not None and (len(args) < self.num_targets or self._lacks_targets(args, kwargs)):
            raise BadInput(
                f"{len(args)} positional arguments given: with loss_fn call fitted(*inputs, *targets) with {self.num_targets} targets last; "
                "for predictions leave them out under torch.no_grad()."
            )

    def _lacks_targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the model's arguments alone: without the last ones it could not be called."""
        if not self.num_targets or self._expects is None:
            return False
        cut = max(0, len(args) - self.num_targets)
        return not _binds(self._expects, args[:cut], kwargs) and _binds(self._expects, args, kwargs)

    @cached_property
    def _expects(self) -> inspect.Signature | None:
        """Of the model's forward; None where nobody knows."""
        try:
            return inspect.signature(self.model.forward)
        except (TypeError, ValueError):
            return None

    # -- steps that are looked at -----------------------------------------------------------------------------------

    def compare(self, shape: _Shape, session: Session, tangents: Tangents, sink: GradientSink, plain: Callable[[], Any]) -> None:
        """With the plain model. A step that is surely wrong is undone, and ends training."""
        if not session.compares or any(i < shape.ready.captured.convention.num_parameters for i in sink.returned):
            return
        inputs = (f"input {i}" for i in range(shape.ready.captured.convention.num_inputs))
        names = (*(n for n, _ in self.model.named_parameters()), *(n for n, _ in self.model.named_buffers()), *inputs)
        try:
            verdict = compare(session, tangents, sink, plain, names, lambda: shape.moment.again(self.subject))
        except CannotJudge as reason:
            shape.note(f"{self._which(shape)} not checked against the plain model: {reason}")
        except Exception as error:
            shape.note(f"{self._which(shape)} not checked against the plain model, which could not be run again: {str(error)[:200]}")
        else:
            shape.compared_steps += 1
            if shape.verdict is None or verdict.worst_fraction > shape.verdict.worst_fraction:
                shape.verdict = verdict
            if not verdict.acceptable:
                session.undo_gradients(sink)
                raise MemfitError(_say_wrong(verdict))

    def _which(self, shape: _Shape) -> str:
        return "first step" if shape.steps <= 1 else "a later step"

    def _will_check(self, shape: _Shape) -> bool:
        """Where the plain model fits in the device's free memory beside our gradients; never where gradients have hooks."""
        captured = shape.ready.captured
        parameters = list(self.model.parameters())
        if self.check is False or any(map(has_gradient_hooks, parameters)):
            return False
        if captured.compiled and any(op.seeded for op in captured.graph.ops):
            shape.note("first step not checked against the plain model: compiled kernels draw other random numbers")
            return False
        if self.check == "always":
            return True
        gradient_bytes = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        needed = max(0, shape.ready.keep_all_peak_bytes - source_bytes(captured)) + gradient_bytes
        fits = needed <= free_bytes(captured.device) // 2
        if not fits:
            shape.note(f"{self._which(shape)} not checked against the plain model: that would take {format_bytes(needed)}")
        return fits and (self.check in (True, EVERY_STEP) or needed <= 2**30)

    def _will_measure(self, shape: _Shape) -> bool:
        """Whether the peak of a first step is measured."""
        return True

    def settle(self, shape: _Shape, measured: int) -> None:
        """Compare measured with planned; a miss above the budget re-plans tighter by as much."""
        shape.measured_peak_bytes = measured
        budget, predicted = shape.budget_bytes, shape.ready.plan.timeline.peak_bytes + shape.ready.elsewhere_bytes
        if budget is not None and measured > budget:
            over = measured - predicted
            shape.notes.append(f"measured {format_bytes(measured)} against {format_bytes(predicted)} predicted: planned again, tighter")
            self._tighten(shape, shape.tighter_by + over)

    def _hold_reserved(self, shape: _Shape) -> None:
        """In a planned arena the reserved bytes are known after some steps, and a miss above the budget re-plans tighter by as much."""
        arena, budget = shape.ready.arena, shape.budget_bytes
        if arena is None or budget is None or shape.reserved_replans >= _RESERVED_REPLANS:
            return
        reserved = arena.reserved_bytes()
        if reserved > budget:
            shape.reserved_replans += 1
            shape.notes.append(f"reserved {format_bytes(reserved)} of a budget of {format_bytes(budget)}: planned again, tighter")
            plan = shape.ready.plan
            unused = (plan.budget.device_bytes or 0) - plan.timeline.peak_bytes  # else the same plan would be found again
            self._tighten(shape, shape.tighter_by + max(unused, 0) + reserved - budget)

    def _tighten(self, shape: _Shape, tighter_by: int) -> None:
        try:
            shape.ready = shape.prepare(tighter_by)
        except MemfitError as error:
            shape.notes.append(f"no tighter plan: {error}")
            return
        shape.tighter_by = tighter_by
        shape.steps, shape.recording = 0, None  # the next step is a trial again

    def _after_oom(self, shape: _Shape, ready: Ready) -> Ready | None:
        """A tighter plan after an out-of-memory error, a few times per shape: torch's allocator may be in pieces as well as short."""
        if shape.oom_replans >= _OOM_REPLANS:
            return None
        shape.oom_replans += 1
        peak, fixed = ready.plan.timeline.peak_bytes, source_bytes(ready.captured)
        budget = ready.plan.budget.device_bytes
        wanted = fixed + (peak - fixed) * 3 // 4
        shape.notes.append(f"out of memory at a planned peak of {format_bytes(peak)}: planned again for {format_bytes(wanted)}")
        self._tighten(shape, (budget if budget is not None else peak) - wanted + shape.tighter_by)
        return shape.ready if shape.ready is not ready else None

    # -- what users ask ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._current().ready.plan

    def _current(self) -> _Shape:
        assert self.latest is not None
        return self.latest

    def report(self) -> Report:
        shape = self._current()
        plan = shape.ready.plan
        base, elsewhere = shape.ready.base_time_ns, shape.ready.elsewhere_bytes
        return Report(
            budget_bytes=shape.budget_bytes,
            predicted_peak_bytes=plan.timeline.peak_bytes + elsewhere,
            measured_peak_bytes=shape.measured_peak_bytes,
            keep_all_peak_bytes=shape.ready.keep_all_peak_bytes + elsewhere,
            overhead_fraction=(plan.timeline.compute_time_ns - base) / base if base else 0.0,
            planner=plan.planner,
            num_shapes=len(self.shapes),
            check=shape.check_sentence,
            notes=tuple(shape.notes),
            arena_bytes=shape.ready.arena.height_bytes if shape.ready.arena is not None else None,
        )


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _say_wrong(verdict: Verdict) -> str:
    return (
        f"the planned step differs from the plain model by {verdict.worst_fraction:.1e} at {verdict.where}, the plain model from itself by "
        f"{verdict.noise_fraction:.1e}: the gradients of this step were wrong, and are taken back. Please report the model; check=False runs "
        "without this check."
    )


def _parts_of(model: nn.Module) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[bool, ...]]:
    """Parameters, buffers and training flags as the module's own iterators give them, in one walk: it is done at every step."""
    parameters: dict[int, torch.Tensor] = {}
    buffers: dict[int, torch.Tensor] = {}
    training: list[bool] = []
    for module in model.modules():
        training.append(module.training)
        for found, tensors in zip((parameters, buffers), own_tensors(module), strict=True):
            for tensor in tensors.values():
                if tensor is not None:
                    found.setdefault(id(tensor), tensor)
    return tuple(parameters.values()), tuple(buffers.values()), tuple(training)


def _mode_of(parameters: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """What besides shapes and training flags changes the traced step: frozen parameters, autocast."""
    device = parameters[0].device.type if parameters else "cpu"
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (tuple(p.requires_grad for p in parameters), autocast)
