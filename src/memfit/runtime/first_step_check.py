"""The first step against the plain model: same outputs, same gradients, same buffers.

Runs inside the first backward, with the step's own inputs, random numbers and incoming gradients, and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.runtime.autograd_step import Session
from memfit.runtime.gradients import Tangents
from memfit.runtime.plain_calls import made_plain
from memfit.runtime.rng import get_state, set_state
from memfit.torch_private.trees import leaves_of

_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`worst_fraction` is the largest relative difference found, 0 when all is bitwise identical; `where` names it.

    `noise_fraction` is how much the plain model differs from itself when run again, looked at only when we differ. For a
    compiled step, whose every kernel rounds otherwise, the plain model is run again with its parameters changed by as little.
    """

    identical: bool
    worst_fraction: float
    where: str
    noise_fraction: float = 0.0

    @property
    def acceptable(self) -> bool:
        """Rounding, or no more than ten times the plain model's own noise (atomics, chaotic networks)."""
        return self.worst_fraction <= max(_TOLERANCE, 10 * self.noise_fraction)

    def sentence(self) -> str:
        if self.identical:
            return "outputs, gradients and buffers identical to the plain model's, bit for bit"
        return f"outputs, gradients and buffers equal the plain model's up to {self.worst_fraction:.1e} (worst: {self.where})"


def compare(session: Session, tangents: Tangents, plain: Callable[[], Any], names: tuple[str, ...]) -> Verdict:
    """Run the plain model as the session ran, and compare. Random state and buffers are put back."""
    parameters = _list_trained(session)
    buffers = {i: session.sources[i].data.clone() for i in session.old_buffers}
    ours = _Values(session.outputs, [p.grad for _, p in parameters], buffers)
    first = _run_plain(session, tangents, plain)
    found = _find_worst(ours, first, [names[i] for i, _ in parameters], names)
    if found.worst_fraction > _TOLERANCE:
        with _nudge(parameters) if session.captured.compiled else nullcontext():
            again = _run_plain(session, tangents, plain)
        noise = _find_worst(again, first, [names[i] for i, _ in parameters], names)
        found = replace(found, noise_fraction=noise.worst_fraction)
    return found


@dataclass(frozen=True, slots=True)
class _Values:
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: dict[int, torch.Tensor]


def _list_trained(session: Session) -> list[tuple[int, torch.Tensor]]:
    return [(i, session.sources[i]) for i in range(session.captured.convention.num_parameters) if session.sources[i].requires_grad]


@contextmanager
def _nudge(parameters: list[tuple[int, torch.Tensor]]) -> Iterator[None]:
    """Parameters off by a rounding error, either way, and put back."""
    before = [p.data.clone() for _, p in parameters]
    generator = torch.Generator().manual_seed(0)
    for _, p in parameters:
        if p.is_floating_point():
            signs = (
                torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8).to(p) * 2 - 1
            )  # of its type: single precision has no such number
            p.data.mul_(1 + signs * (2 * torch.finfo(p.dtype).eps))
    try:
        yield
    finally:
        for (_, p), old in zip(parameters, before, strict=True):
            p.data.copy_(old)


def _run_plain(session: Session, tangents: Tangents, plain: Callable[[], Any]) -> _Values:
    """The plain model on the session's inputs, random numbers and incoming gradients."""
    convention, device = session.captured.convention, session.captured.device
    planned = {i: session.sources[i].data.clone() for i in session.old_buffers}
    present = get_state(device)
    for i, old in session.old_buffers.items():
        session.sources[i].data.copy_(old)
    set_state(device, session.rng_at_start)
    try:
        with made_plain(), torch.enable_grad():
            outputs = [t for t in leaves_of(plain()) if isinstance(t, torch.Tensor)]
            used = [(outputs[i], t) for i, t in zip(convention.differentiable, tangents, strict=True) if t is not None]
            leaves = [p for _, p in _list_trained(session)]
            gradients = torch.autograd.grad([o for o, _ in used], leaves, [t for _, t in used], allow_unused=True)
        buffers = {i: session.sources[i].data.clone() for i in session.old_buffers}
        return _Values([o.detach() for o in outputs], list(gradients), buffers)
    finally:
        for i, value in planned.items():
            session.sources[i].data.copy_(value)
        set_state(device, present)


def _find_worst(ours: _Values, plain: _Values, parameter_names: list[str], names: tuple[str, ...]) -> Verdict:
    found = _WorstDifference()
    for k, (a, b) in enumerate(zip(ours.outputs, plain.outputs, strict=True)):
        found.look(f"output {k}", a, b)
    for name, x, y in zip(parameter_names, ours.gradients, plain.gradients, strict=True):
        found.look(f"gradient of {name}", x, y)
    for i, value in ours.buffers.items():
        found.look(f"buffer {names[i]}", value, plain.buffers[i])
    return found.verdict()


class _WorstDifference:
    def __init__(self) -> None:
        self.identical, self.fraction, self.where = True, 0.0, ""

    def look(self, where: str, ours: torch.Tensor | None, plain: torch.Tensor | None) -> None:
        if ours is None or plain is None:
            if (ours is None) != (plain is None):
                self.identical, self.fraction, self.where = False, float("inf"), where
            return
        if torch.equal(ours, plain):
            return
        self.identical = False
        scale = plain.abs().max().double().item() if plain.numel() else 0.0
        difference = (ours.double() - plain.double()).abs().max().item() / max(scale, 1e-30)
        if difference != difference or difference > self.fraction:
            self.fraction, self.where = (float("inf") if difference != difference else difference), where

    def verdict(self) -> Verdict:
        return Verdict(identical=self.identical, worst_fraction=self.fraction, where=self.where)
