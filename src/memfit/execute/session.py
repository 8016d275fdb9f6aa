"""One step of a planned model under autograd: forward now, backward when the gradients come.

Gradients are put into .grad as each one appears, so that the full set never exists twice. What backward needs is kept in
a list that the generated code empties as it goes; autograd's own saving would pin all of it to the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit.capture.captured import Captured, Ref
from memfit.core.errors import Unsupported
from memfit.execute.codegen import Program
from memfit.execute.rng import Replay


class Session:
    """The life of one forward and its backward."""

    def __init__(self, captured: Captured, program: Program, sources: tuple[torch.Tensor, ...]) -> None:
        self.captured, self.program = captured, program
        self.sources = sources
        self.rng = Replay(captured.device)
        self.saved: list[Any] | None = None
        self.mutations: list[torch.Tensor] = []

    def forward(self) -> list[torch.Tensor]:
        """The model's output tensors; buffers are updated here, once."""
        outputs, mutations, self.saved = self.program.forward([*self.sources, *self.captured.convention.constants], self.rng)
        for (position, _), value in zip(self.captured.convention.mutations, mutations, strict=True):
            self.sources[position].data.copy_(value)
        return outputs

    def backward(self, tangents: tuple[torch.Tensor, ...], sink: GradientSink) -> None:
        assert self.program.backward is not None
        if self.saved is None:
            raise Unsupported(
                "backward was called twice on one forward of a fitted model: its activations are gone after the first; call the model again."
            )
        saved, self.saved = self.saved, None
        like = self.captured.samples
        aligned = [_with_layout(t, like[k]) for t, k in zip(tangents, self.captured.convention.tangents, strict=True)]
        self.program.backward(saved, aligned, sink.put, self.rng)


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
    """What autograd's AccumulateGrad does: hooks, then steal, copy or add, then post-accumulate hooks."""
    for hook in (leaf._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if leaf.grad is None:
        same_layout = gradient.stride() == leaf.stride() and gradient.dtype == leaf.dtype
        if keeps and same_layout:
            leaf.grad = gradient.detach()
        else:
            fresh = torch.empty_like(leaf, requires_grad=False)
            fresh.copy_(gradient)
            leaf.grad = fresh
    else:
        leaf.grad.add_(gradient)
    for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(leaf)


def _with_layout(tangent: torch.Tensor, sample: torch.Tensor | None) -> torch.Tensor:
    """Backward was traced for this layout: an expanded or permuted gradient is copied into it."""
    if sample is None or tangent.stride() == sample.stride():
        return tangent.detach()
    fresh = torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype, device=tangent.device)
    return fresh.copy_(tangent)


class PlannedStep(torch.autograd.Function):
    """Ties a session into autograd."""

    @staticmethod
    def forward(ctx: Any, session: Session, holder: list[Any], *sources: torch.Tensor) -> Any:
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
        session: Session = ctx.session
        sink = GradientSink(session.sources, _returned(ctx, session))
        session.backward(tangents, sink)
        return (None, None, *(sink.collected.get(i) for i in range(len(session.sources))))


def _returned(ctx: Any, session: Session) -> frozenset[int]:
    """Sources whose gradient goes back through autograd: inputs, and parameters asked for by torch.autograd.grad."""
    num_parameters = session.captured.convention.num_parameters
    back = {i for i in range(num_parameters, len(session.sources)) if ctx.needs_input_grad[2 + i]}
    for i in range(num_parameters):
        leaf = session.sources[i]
        if ctx.needs_input_grad[2 + i] and (not leaf.is_leaf or not _accumulates_now(leaf)):
            back.add(i)
    return frozenset(back)


def _accumulates_now(leaf: torch.Tensor) -> bool:
    """Whether this backward will put a gradient into leaf.grad; torch.autograd.grad will not."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return bool(torch._C._will_engine_execute_node(node))


def run(captured: Captured, program: Program, sources: tuple[torch.Tensor, ...]) -> Any:
    """Call the planned step; the result has the model's own structure."""
    session = Session(captured, program, sources)
    holder: list[Any] = []
    if captured.has_backward:
        graded = iter(PlannedStep.apply(session, holder, *sources))
        tensors = [next(graded) if x is None else x for x in holder]
    else:
        tensors = session.forward()
    feed = iter(tensors)
    leaves = [next(feed) if isinstance(o, Ref) else o for o in captured.convention.outputs]
    return pytree.tree_unflatten(leaves, captured.convention.output_spec)
