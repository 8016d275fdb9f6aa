"""One step of a planned model under autograd: forward now, backward when the gradients come.

Gradients are put into .grad as each one appears, so that the full set never exists twice. What backward needs is kept in
a list that the generated code empties as it goes; autograd's own saving would pin all of it to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from memfit.capture.captured import Captured, LeftOut, LeftOutObject, Ref
from memfit.core.costs import Costs
from memfit.core.errors import Unsupported
from memfit.core.plan import Plan
from memfit.runtime.arena.planned import Run, StepArena
from memfit.runtime.codegen import Program, generate
from memfit.runtime.gradients import GradientSink, Tangents, match_layouts
from memfit.runtime.host_copies import HostCopies
from memfit.runtime.rng import RandomStates, get_state, set_state
from memfit.runtime.traced_layouts import TracedLayouts
from memfit.runtime.versions import Versions
from memfit.torch_private.autograd import is_checkpointing, versions_of
from memfit.torch_private.tensors import copy_each, disable_autocast, has_hooks, will_execute
from memfit.torch_private.trees import unflatten

_T = TypeVar("_T")
TWICE = "backward was called twice on one forward of a fitted model, and its activations are gone after the first: call the model again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A plan made executable, beside the peak and the op time of the step without recomputation."""

    captured: Captured
    costs: Costs
    plan: Plan
    program: Program
    keep_all_peak_bytes: int
    base_time_ns: int
    elsewhere_bytes: int = 0  # held by the process outside the step
    margin_bytes: int = 0  # of the budget, left for the allocator's slack
    notes: tuple[str, ...] = ()  # for the report: what is other than asked
    arena: StepArena | None = None  # where the step's allocations lie, after `use_planned_arena`
    layouts: TracedLayouts | None = None  # looks at every result, in the first step

    def settle_layouts(self) -> Ready:
        """After a whole step: with copies of what lies otherwise than traced, and no looks."""
        if self.layouts is None:
            return self
        return replace(self, program=generate(self.captured, self.plan.schedule, self.layouts, self.layouts.found), layouts=None)

    @property
    def room_bytes(self) -> int:
        """What the step holds at its peak besides what the caller does."""
        return self.plan.timeline.peak_bytes - source_bytes(self.captured)

    def make_room(self) -> None:
        """One block of CUDA memory for the whole step, free again at once: torch's allocator splits it as the step's allocations come, where it would
        otherwise keep blocks of every size once asked for."""
        if self.captured.device.type == "cuda" and self.arena is None:
            torch.cuda.empty_cache()
            with suppress(torch.OutOfMemoryError):
                torch.empty(self.room_bytes, dtype=torch.uint8, device=self.captured.device)


def source_bytes(captured: Captured) -> int:
    """What the caller holds throughout: parameters, buffers, inputs, optimizer state, gradients from before."""
    graph = captured.graph
    return sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in graph.sources})


class Watch(Protocol):
    """Looks on at a trial: around its forward, around its backward, and when all is done."""

    def forward(self) -> AbstractContextManager[None]: ...

    def backward(self) -> AbstractContextManager[None]: ...

    def done(self, session: Session, tangents: Tangents, sink: GradientSink) -> None: ...


class Step(Protocol):
    """One forward and its backward, called (`Session`) or replayed (`recorded.Replayed`)."""

    captured: Captured
    sources: tuple[torch.Tensor, ...]

    def forward(self) -> list[torch.Tensor]: ...

    def backward(self, tangents: Tangents, sink: GradientSink) -> None: ...

    def reached_from(self) -> Mapping[int, frozenset[int]]: ...


class Session:
    """The life of one forward and its backward. A trial keeps what it needs to be undone or repeated.

    Whatever fails on the way, Ctrl-C included, leaves the step undone or done: a forward gives its random numbers back, a backward
    takes its gradients back; where those went into gradients that were there before, it is run to its end first.
    """

    def __init__(self, ready: Ready, sources: tuple[torch.Tensor, ...], *, trial: bool, replan: Callable[[Ready], Ready | None]) -> None:
        self.ready, self.sources, self.trial, self.replan = ready, sources, trial, replan
        self.captured = ready.captured
        self.saved: list[Any] | None = None
        self.rng_at_start = get_state(self.captured.device)
        self.old_buffers: dict[int, torch.Tensor] = {}
        self.compares = False  # a trial that will be compared with the plain model keeps all buffers, before and after
        self.new_buffers: dict[int, torch.Tensor] = {}
        self.old_gradients: dict[int, torch.Tensor] = {}  # what this step's are added to, where it is compared
        self.outputs: list[torch.Tensor] = []
        self._output_versions: list[int] = []
        self.watch: Watch | None = None
        self.arena_run: Run | None = None
        self.updated = False
        self.versions: Versions | None = None

    def reached_from(self) -> Mapping[int, frozenset[int]]:
        return self.ready.program.reached_from

    def forward(self) -> list[torch.Tensor]:
        """The model's output tensors; buffers are updated here, once, after everything that can fail."""
        try:
            return self._forward()
        except BaseException:
            self.saved = None
            if not self.updated:
                set_state(self.captured.device, self.rng_at_start)
            raise

    def _forward(self) -> list[torch.Tensor]:
        kept = {i for i, _ in self.captured.convention.mutations} if self.compares else set(self.captured.rereads)
        self.old_buffers = {i: self.sources[i].data.clone() for i in sorted(kept)}
        with self.watch.forward() if self.watch else nullcontext():
            made, shortage = _attempt(self._run_forward)
            while shortage:
                self._take_tighter_plan(shortage)
                set_state(self.captured.device, self.rng_at_start)
                made, shortage = _attempt(self._run_forward)
            assert made is not None
            outputs, mutations = made
            del made
            self._update(mutations)
            del mutations
        if self.compares:
            self.outputs = [o.detach() for o in outputs]
            self._output_versions = versions_of(self.outputs)
            self.new_buffers = {i: self.sources[i].data.clone() for i in self.old_buffers}
        assert self.saved is not None
        self.versions = Versions(self.captured, self.sources, self.saved)
        return outputs

    def forget_trial(self) -> None:
        self.outputs, self.old_buffers, self.new_buffers, self.old_gradients, self.watch = [], {}, {}, {}, None

    def is_untouched(self, output: int) -> bool:
        """Whether an output of a trial is as forward gave it."""
        return versions_of(self.outputs[output : output + 1]) == self._output_versions[output : output + 1]

    def undo_gradients(self, sink: GradientSink) -> None:
        """Gradients are again what they were before this step, where it was compared."""
        sink.take_back()
        for i in sink.added & self.old_gradients.keys():
            grad = self.sources[i].grad
            if grad is not None:
                grad.copy_(self.old_gradients[i])

    @property
    def sources_unchanged(self) -> bool:
        """Whether forward would read now what it read then, but for buffers that it changes."""
        return self.versions is not None and self.versions.find_changed_source() is None

    def _update(self, mutations: list[torch.Tensor]) -> None:
        """The new values of buffers, all of them: interrupted in between, the copies are made again."""
        self.updated = True
        try:
            update_sources(self.captured, self.sources, mutations)
        except BaseException:
            update_sources(self.captured, self.sources, mutations)
            raise

    def _run_forward(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.rng, self.host = RandomStates(self.captured.device), HostCopies(self.captured.device)
        sources = [*self.sources, *self.captured.convention.constants]
        self.arena_run = self.ready.arena.start() if self.ready.arena is not None else None
        with self.arena_run or nullcontext(), disable_autocast():  # the casts are in the plan
            outputs, mutations, self.saved = self.ready.program.forward(sources, self.rng, self.host, self.old_buffers)
        return outputs, mutations

    def backward(self, tangents: Tangents, sink: GradientSink) -> None:
        if self.saved is None or self.versions is None:
            raise Unsupported(TWICE)
        self.versions.require_same(self.saved)
        aligned = match_layouts(self.captured, tangents)
        if self.compares:
            self.old_gradients = {i: s.grad.clone() for i, s in enumerate(self.sources) if s.is_leaf and s.grad is not None}
        try:
            self._backward(aligned, sink)
        except BaseException:
            self.saved = None
            self._leave_whole(aligned, sink)
            raise
        if self.watch is None:
            self.old_buffers = {}
        else:
            given = tuple(None if t is None else a for t, a in zip(tangents, aligned, strict=True))
            self.watch.done(self, given, sink)

    def _backward(self, tangents: list[torch.Tensor], sink: GradientSink) -> None:
        with self.watch.backward() if self.watch else nullcontext():
            _, shortage = _attempt(lambda: self._run_backward(tangents, sink))
            while shortage:
                self._take_tighter_plan(shortage)
                _, shortage = _attempt(lambda: self._repeat(tangents, sink))

    def _leave_whole(self, tangents: list[torch.Tensor], sink: GradientSink) -> None:
        """After a failure: no gradient of this step, or, where some were added to gradients from before, all of them."""
        sink.settle()
        if sink.added:
            with suppress(Exception):
                self._repeat(tangents, sink)
        else:
            sink.take_back()

    def _run_backward(self, tangents: list[torch.Tensor], sink: GradientSink) -> None:
        assert self.ready.program.backward is not None
        saved, self.saved = self.saved, None
        with self.arena_run or nullcontext(), disable_autocast():
            self.ready.program.backward(saved, tangents, sink.put, self.rng, self.host)
        if self.arena_run is not None:
            self.arena_run.finish()

    def _repeat(self, tangents: list[torch.Tensor], sink: GradientSink) -> None:
        """After running out of memory in the middle of backward: the whole step again; gradients already put are skipped."""
        assert self.versions is not None
        self.versions.require_same_sources()
        sink.settle()
        device = self.captured.device
        present = get_state(device)
        current = {i: self.sources[i].data.clone() for i in self.old_buffers}
        for i, old in self.old_buffers.items():
            self.sources[i].data.copy_(old)
        set_state(device, self.rng_at_start)
        try:
            self._run_forward()
        finally:
            for i, value in current.items():
                self.sources[i].data.copy_(value)
            set_state(device, present)
        self._run_backward(tangents, sink)

    def _take_tighter_plan(self, shortage: str) -> None:
        self.saved = None
        if self.captured.device.type == "cuda":
            torch.cuda.empty_cache()
        tighter = self.replan(self.ready)
        if tighter is None:
            raise torch.OutOfMemoryError(shortage)
        self.ready, self.captured = tighter, tighter.captured


def _attempt(function: Callable[[], _T]) -> tuple[_T | None, str]:
    """The result, or what the out-of-memory error said. Back here its traceback, which holds every tensor of the attempt, is gone."""
    try:
        return function(), ""
    except torch.OutOfMemoryError as error:
        return None, str(error) or "out of memory"


def update_sources(captured: Captured, sources: Sequence[torch.Tensor], mutations: list[torch.Tensor]) -> None:
    """What forward changes in place: running statistics, mostly. Those of one type together: a launch each is a millisecond of a ResNet's step.

    A buffer that forward also computes with counts as changed for autograd, as in the plain model; running statistics do not, as there.
    """
    together: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for (position, _), value in zip(captured.convention.mutations, mutations, strict=True):
        old, new = together.setdefault((value.dtype, value.device), ([], []))
        old.append(sources[position].detach() if position in captured.rereads else sources[position].data)
        new.append(value)
    for old, new in together.values():
        copy_each(old, new)


class PlannedStep(torch.autograd.Function):
    """Ties a session into autograd."""

    @staticmethod
    def forward(ctx: Any, session: Step, holder: list[Any], *sources: torch.Tensor) -> Any:
        outputs = session.forward()
        ctx.session = session
        ctx.set_materialize_grads(False)  # an output that the loss does not use has no gradient, not one of zeros
        differentiable = session.captured.convention.differentiable
        holder.extend(None if i in differentiable else o for i, o in enumerate(outputs))
        return tuple(outputs[i] for i in differentiable)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "a gradient of a gradient (create_graph=True) was asked of a fitted model: use the plain model for double backward."
            )
        session: Step = ctx.session
        if all(t is None for t in tangents):
            return (None, None, *(None for _ in session.sources))
        sink = GradientSink(session.sources, _find_returned(ctx, session), _find_unreached(session, tangents))
        session.backward(tangents, sink)
        return (None, None, *(sink.collected.pop(i, None) for i in range(len(session.sources))))


def _find_unreached(session: Step, tangents: Tangents) -> frozenset[int]:
    """Sources whose gradient is made only of outputs that the loss does not use. Autograd would call their hooks with nothing."""
    absent = frozenset(k for k, t in enumerate(tangents) if t is None)
    if not absent:
        return absent
    unreached = frozenset(i for i, parts in session.reached_from().items() if parts <= absent)
    for i in sorted(unreached):
        if has_hooks(session.sources[i]):
            name = session.captured.graph.tensors[session.captured.convention.sources[i]].name
            raise Unsupported(
                f"{name} has a hook on its gradient, and the loss uses no output that depends on it: leave that output out of what the model "
                "returns, or remove the hook for this step."
            )
    return unreached


def _find_returned(ctx: Any, session: Step) -> frozenset[int]:
    """Sources whose gradient goes back through autograd at the end: inputs, parameters with hooks, which autograd calls, and
    parameters asked for by torch.autograd.grad. A hook that changes a parameter must not run while backward still reads it."""
    num_parameters, wanted = session.captured.convention.num_parameters, ctx.needs_input_grad[2:]
    nodes = [node for node, _ in ctx.next_functions]  # one per tensor: of a leaf, what puts its gradient into .grad
    back = {i for i in range(num_parameters, len(session.sources)) if wanted[i]}
    for i in range(num_parameters):
        leaf = session.sources[i]
        if wanted[i] and (not leaf.is_leaf or has_hooks(leaf) or not will_execute(nodes[i])):
            back.add(i)
    return frozenset(back)


def run(session: Step, beside: Callable[[int, Any, torch.Tensor | None], Any] | None = None) -> Any:
    """Call the planned step; the result has the model's own structure. `beside` gives what stands in for an output that the step leaves out,
    next to one that it makes."""
    convention = session.captured.convention
    if convention.mutations and is_checkpointing():
        raise Unsupported(
            "a fitted model that changes buffers (BatchNorm's statistics, say) was called inside torch.utils.checkpoint, which runs it again "
            "and changes them twice: call it without; it recomputes by its own plan."
        )
    holder: list[Any] = []
    graded = iter(PlannedStep.apply(session, holder, *session.sources))
    feed = iter([next(graded) if x is None else x for x in holder])
    leaves = [next(feed) if isinstance(o, Ref) else o for o in convention.outputs]
    if beside is not None:
        graded = next((t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad), None)
        leaves = [beside(i, x, graded) if isinstance(x, LeftOut | LeftOutObject) else x for i, x in enumerate(leaves)]
    return unflatten(leaves, convention.output_spec)
