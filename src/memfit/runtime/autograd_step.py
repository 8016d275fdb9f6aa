"""One step of a planned model under autograd: forward now, backward when the gradients come.

Gradients are put into .grad as each one appears, so that the full set never exists twice. What backward needs is kept in
a list that the generated code empties as it goes; autograd's own saving would pin all of it to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from memfit.capture.captured import Captured, Ref
from memfit.core.costs import Costs
from memfit.core.errors import Unsupported
from memfit.core.plan import Plan
from memfit.runtime.arena.planned import Run, StepArena
from memfit.runtime.codegen import Program
from memfit.runtime.host_copies import HostCopies
from memfit.runtime.rng import RandomStates, get_state, set_state
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
    note: str = ""  # for the report: what is other than asked
    arena: StepArena | None = None  # where the step's allocations lie, after `use_planned_arena`

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

    def done(self, session: Session, tangents: tuple[torch.Tensor, ...], sink: GradientSink) -> None: ...


class Step(Protocol):
    """One forward and its backward, called (`Session`) or replayed (`recorded.Replayed`)."""

    captured: Captured
    sources: tuple[torch.Tensor, ...]

    def forward(self) -> list[torch.Tensor]: ...

    def backward(self, tangents: tuple[torch.Tensor, ...], sink: GradientSink) -> None: ...


class Session:
    """The life of one forward and its backward. A trial keeps what it needs to be undone or repeated."""

    def __init__(self, ready: Ready, sources: tuple[torch.Tensor, ...], *, trial: bool, replan: Callable[[Ready], Ready | None]) -> None:
        self.ready, self.sources, self.trial, self.replan = ready, sources, trial, replan
        self.captured = ready.captured
        self.saved: list[Any] | None = None
        self.rng_at_start = get_state(self.captured.device)
        self.old_buffers: dict[int, torch.Tensor] = {}
        self.outputs: list[torch.Tensor] = []
        self.watch: Watch | None = None
        self.arena_run: Run | None = None

    def forward(self) -> list[torch.Tensor]:
        """The model's output tensors; buffers are updated here, once, after everything that can fail."""
        kept = {i for i, _ in self.captured.convention.mutations} if self.trial else set(self.captured.rereads)
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
            update_sources(self.captured, self.sources, mutations)
            del mutations
        if self.trial:
            self.outputs = [o.detach() for o in outputs]
        return outputs

    def _run_forward(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.rng, self.host = RandomStates(self.captured.device), HostCopies(self.captured.device)
        sources = [*self.sources, *self.captured.convention.constants]
        self.arena_run = self.ready.arena.start() if self.ready.arena is not None else None
        with self.arena_run or nullcontext(), disable_autocast():  # the casts are in the plan
            outputs, mutations, self.saved = self.ready.program.forward(sources, self.rng, self.host)
        return outputs, mutations

    def backward(self, tangents: tuple[torch.Tensor, ...], sink: GradientSink) -> None:
        if self.saved is None:
            raise Unsupported(TWICE)
        aligned = match_layouts(self.captured, tangents)
        with self.watch.backward() if self.watch else nullcontext():
            _, shortage = _attempt(lambda: self._run_backward(aligned, sink))
            while shortage:
                self._take_tighter_plan(shortage)
                _, shortage = _attempt(lambda: self._repeat(aligned, sink))
        if self.watch is not None:
            self.watch.done(self, tuple(aligned), sink)

    def _run_backward(self, tangents: list[torch.Tensor], sink: GradientSink) -> None:
        assert self.ready.program.backward is not None
        saved, self.saved = self.saved, None
        with self.arena_run or nullcontext(), disable_autocast():
            self.ready.program.backward(saved, tangents, sink.put, self.rng, self.host)
        if self.arena_run is not None:
            self.arena_run.finish()

    def _repeat(self, tangents: list[torch.Tensor], sink: GradientSink) -> None:
        """After running out of memory in the middle of backward: the whole step again; gradients already put are skipped."""
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


class GradientSink:
    """Takes gradients as they appear: into .grad, or back to autograd for inputs and for torch.autograd.grad."""

    def __init__(self, sources: tuple[torch.Tensor, ...], returned: frozenset[int]) -> None:
        self.sources, self.returned = sources, returned
        self.collected: dict[int, torch.Tensor] = {}
        self.done: set[int] = set()

    def put(self, position: int, gradient: torch.Tensor, keeps: bool) -> None:
        if position in self.done:
            return
        self.done.add(position)
        if position in self.returned:
            self.collected[position] = gradient
        else:
            accumulate(self.sources[position], gradient, keeps)


def accumulate(leaf: torch.Tensor, gradient: torch.Tensor, keeps: bool) -> None:
    """What autograd's AccumulateGrad does: steal, copy or add."""
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    else:
        leaf.grad = lay_out_gradient(leaf, gradient, keeps)


def lay_out_gradient(leaf: torch.Tensor, gradient: torch.Tensor, keeps: bool) -> torch.Tensor:
    """In the leaf's layout and type; itself if it may be kept."""
    if keeps and gradient.stride() == leaf.stride() and gradient.dtype == leaf.dtype:
        return gradient.detach()
    return torch.empty_like(leaf, requires_grad=False).copy_(gradient)


def update_sources(captured: Captured, sources: Sequence[torch.Tensor], mutations: list[torch.Tensor]) -> None:
    """What forward changes in place: running statistics, mostly. Those of one type together: a launch each is a millisecond of a ResNet's step."""
    together: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for (position, _), value in zip(captured.convention.mutations, mutations, strict=True):
        old, new = together.setdefault((value.dtype, value.device), ([], []))
        old.append(sources[position].data)
        new.append(value)
    for old, new in together.values():
        copy_each(old, new)


def match_layouts(captured: Captured, tangents: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [_match_layout(t, captured.samples[k]) for t, k in zip(tangents, captured.convention.tangents, strict=True)]


def _match_layout(tangent: torch.Tensor, sample: torch.Tensor | None) -> torch.Tensor:
    """Backward was traced for this layout: an expanded or permuted gradient is copied into it."""
    if sample is None or tangent.stride() == sample.stride():
        return tangent.detach()
    fresh = torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype, device=tangent.device)
    return fresh.copy_(tangent)


class PlannedStep(torch.autograd.Function):
    """Ties a session into autograd."""

    @staticmethod
    def forward(ctx: Any, session: Step, holder: list[Any], *sources: torch.Tensor) -> Any:
        outputs = session.forward()
        ctx.session = session
        differentiable = session.captured.convention.differentiable
        holder.extend(None if i in differentiable else o for i, o in enumerate(outputs))
        return tuple(outputs[i] for i in differentiable)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "a gradient of a gradient (create_graph=True) was asked of a fitted model: use the plain model for double backward."
            )
        session: Step = ctx.session
        sink = GradientSink(session.sources, _find_returned(ctx, session))
        session.backward(tangents, sink)
        return (None, None, *(sink.collected.pop(i, None) for i in range(len(session.sources))))


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


def run(session: Step) -> Any:
    """Call the planned step; the result has the model's own structure."""
    convention = session.captured.convention
    holder: list[Any] = []
    graded = iter(PlannedStep.apply(session, holder, *session.sources))
    feed = iter([next(graded) if x is None else x for x in holder])
    leaves = [next(feed) if isinstance(o, Ref) else o for o in convention.outputs]
    return unflatten(leaves, convention.output_spec)
