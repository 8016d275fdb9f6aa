"""Gradients on their way in and out of a step: those of outputs arrive, those of parameters are put away as they appear."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.captured import Captured

Tangents = tuple[torch.Tensor | None, ...]
"""The outputs' gradients; None for an output that the loss does not use."""


class GradientSink:
    """Takes gradients as they appear: into .grad, or back to autograd for inputs and for torch.autograd.grad.

    `skipped` are sources whose gradient depends on nothing that arrived: they get none, as in the plain model. What was done is
    written down after it is done, so that a step that is repeated neither forgets a gradient nor adds one twice.
    """

    def __init__(self, sources: tuple[torch.Tensor, ...], returned: frozenset[int], skipped: frozenset[int] = frozenset()) -> None:
        self.sources, self.returned = sources, returned
        self.collected: dict[int, torch.Tensor] = {}
        self.done: set[int] = set(skipped)
        self.added: set[int] = set()  # to a gradient that was there before
        self.made: set[int] = set()
        self._begun: tuple[int, int] | None = None  # (position, version of the gradient before, -1 if there was none)

    def put(self, position: int, gradient: torch.Tensor, keeps: bool) -> None:
        if position in self.done:
            return
        if position in self.returned:
            self.collected[position] = gradient
            self.done.add(position)
            return
        leaf = self.sources[position]
        self._begun = (position, -1 if leaf.grad is None else leaf.grad._version)
        accumulate(leaf, gradient, keeps)
        self.settle()

    def settle(self) -> None:
        """Write down the gradient that was on its way, if it arrived."""
        if self._begun is None:
            return
        (position, before), grad = self._begun, self.sources[self._begun[0]].grad
        if grad is not None and (before < 0 or grad._version != before):
            (self.made if before < 0 else self.added).add(position)
            self.done.add(position)
        self._begun = None

    def take_back(self) -> None:
        """No gradient of this step remains; only where none was added to another."""
        for position in self.made:
            self.sources[position].grad = None
        self.collected.clear()


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


def match_layouts(captured: Captured, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [_match_layout(t, captured.samples[k], captured.device) for t, k in zip(tangents, captured.convention.tangents, strict=True)]


def _match_layout(tangent: torch.Tensor | None, sample: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Backward was traced for this layout: an expanded or permuted gradient is copied into it, zeros stand for one that is not there."""
    if tangent is None:
        assert sample is not None
        return torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype, device=device).zero_()
    if sample is None or tangent.stride() == sample.stride():
        return tangent.detach()
    fresh = torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype, device=tangent.device)
    return fresh.copy_(tangent)


def are_there(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether gradients of earlier steps are there, to which those of this one are added."""
    return any(p.grad is not None for p in parameters if p.requires_grad)


def count_left(sources: Sequence[torch.Tensor]) -> int:
    """Bytes of gradients on what is frozen: of its time before, or of another model's step (a critic inside a generator's)."""
    return sum(s.grad.nbytes for s in sources if not s.requires_grad and s.grad is not None)
