"""A step against the plain model, the first one or every one: same outputs, same gradients, same buffers.

    our step ── outputs, gradients of this call, buffers ──┐ each tensor's difference
    plain    ── same inputs, numbers, autocast, tangents ──┘      └─ small for its type? ── fine
    plain again, and with parameters off by rounding errors ── how much do these differ? ── our difference is larger by far ── wrong

One set of rounding errors may leave on its side every activation that is nearly zero, and every maximum that is nearly two: several are tried.

Runs inside the first backward and leaves no trace. It stops training only when it is sure: what was changed since forward is not
compared, and a model that differs from itself as much as we do says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.captured import LeftOut
from memfit.runtime.autograd_step import Session
from memfit.runtime.gradients import GradientSink, Tangents
from memfit.runtime.plain_calls import made_plain
from memfit.runtime.rng import get_state, set_state
from memfit.torch_private.checkpoints import checkpoints_left_out
from memfit.torch_private.random_ops import keep_random_states
from memfit.torch_private.trees import leaves_of, take_apart

_LEAST_TOLERANCE = 1e-3
_ROUNDINGS = 16
"""How many roundings of the narrowest type a difference may be without a second look."""
_NUDGES = 8
"""How many sets of rounding errors are tried before a step is called wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`worst_fraction` is the largest relative difference found, 0 when all is bitwise identical; `where` names it.

    `noise_fraction` is how much the plain model differs from itself there, when run again and with parameters changed by a rounding
    error; looked at only when we differ. `tolerance_fraction` is what the narrowest number type of the step allows.
    """

    identical: bool
    worst_fraction: float
    where: str
    noise_fraction: float = 0.0
    tolerance_fraction: float = _LEAST_TOLERANCE

    @property
    def acceptable(self) -> bool:
        """Rounding, or no more than ten times the plain model's own noise (atomics, chaotic networks)."""
        return self.worst_fraction <= max(self.tolerance_fraction, 10 * self.noise_fraction)

    def sentence(self) -> str:
        if self.identical:
            return "outputs, gradients and buffers identical to the plain model's, bit for bit"
        return f"outputs, gradients and buffers equal the plain model's up to {self.worst_fraction:.1e} (worst: {self.where})"


EVERY_STEP = "every step"
"""What may be asked for beside True, False and "auto", which are about the first step."""


class CannotJudge(Exception):
    """Why the step cannot be compared."""


def compare(
    session: Session,
    tangents: Tangents,
    sink: GradientSink,
    plain: Callable[[], Any],
    names: tuple[str, ...],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Verdict:
    """Run the plain model as the session ran, and compare. Random state and buffers are put back. `around` is the forward's own state."""
    if not session.sources_unchanged:
        raise CannotJudge("a parameter, buffer or input was changed between forward and backward")
    compared = _Compared(session, sink, names)

    def run() -> dict[str, torch.Tensor | None]:
        with around():
            return _run_plain(session, tangents, plain, compared)

    with keep_random_states():
        ours, first = compared.ours(), run()
        verdict = _find_worst(ours, first, {}, tolerance := _tolerance_of(session))
        if verdict.worst_fraction > tolerance:
            noise = _differences(run(), first)
            for attempt in range(_NUDGES):
                with _nudged(session, tolerance / _ROUNDINGS, attempt):
                    for name, difference in _differences(run(), first).items():
                        noise[name] = max(noise.get(name, 0.0), difference)
                verdict = _find_worst(ours, first, noise, tolerance)
                if verdict.acceptable:
                    break
    return verdict


class _Compared:
    """What of a step is compared, by name: outputs as they left, gradients (with those from before, where they were added), buffers as forward left them."""

    def __init__(self, session: Session, sink: GradientSink, names: tuple[str, ...]) -> None:
        self.session, self.sink, self.names = session, sink, names
        count = session.captured.convention.num_parameters
        trained = [i for i in range(len(session.sources)) if session.sources[i].requires_grad]
        self.parameters = [
            i for i in trained if i < count and (i in sink.made or i in session.old_gradients or session.sources[i].grad is None)
        ]
        self.inputs = [i for i in trained if i >= count and i in sink.collected]

    def ours(self) -> dict[str, torch.Tensor | None]:
        session = self.session
        found: dict[str, torch.Tensor | None] = {f"output {k}": o for k, o in enumerate(session.outputs) if session.is_untouched(k)}
        found |= {f"gradient of {self.names[i]}": session.sources[i].grad for i in self.parameters}
        found |= {f"gradient of {self.names[i]}": self.sink.collected[i] for i in self.inputs}
        return found | {f"buffer {self.names[i]}": value for i, value in session.new_buffers.items()}


def _tolerance_of(session: Session) -> float:
    """By the narrowest type that the step computes in: under autocast that is not the parameters'."""
    types = {t.dtype for t in session.captured.samples if t is not None and t.dtype.is_floating_point and t.dtype.itemsize > 1}
    return max(_LEAST_TOLERANCE, _ROUNDINGS * max((torch.finfo(t).eps for t in types), default=0.0))


@contextmanager
def _nudged(session: Session, eps: float, seed: int) -> Iterator[None]:
    """Parameters off by a rounding error of their own type, or of the narrowest that the step computes in, and put back."""
    parameters = [p for p in session.sources[: session.captured.convention.num_parameters] if p.is_floating_point()]
    before = [p.data.clone() for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    narrow = eps if eps > _LEAST_TOLERANCE / _ROUNDINGS else 0.0
    try:
        for p in parameters:  # signs of its type: single precision has no number that close to one
            signs = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8).to(p) * 2 - 1
            p.data.mul_(1 + signs * max(2 * torch.finfo(p.dtype).eps, narrow))
        yield
    finally:
        for p, old in zip(parameters, before, strict=True):
            p.data.copy_(old)


def _run_plain(session: Session, tangents: Tangents, plain: Callable[[], Any], compared: _Compared) -> dict[str, torch.Tensor | None]:
    """The plain model on the session's inputs, random numbers and incoming gradients."""
    convention, device, names = session.captured.convention, session.captured.device, compared.names
    present = {i: session.sources[i].data.clone() for i in session.old_buffers}
    numbers = get_state(device)
    try:
        for i, old in session.old_buffers.items():
            session.sources[i].data.copy_(old)
        set_state(device, session.rng_at_start)
        with made_plain(), torch.enable_grad(), checkpoints_left_out():
            outputs = _outputs_made(session, leaves_of(take_apart(plain())))
            found: dict[str, torch.Tensor | None] = {f"output {k}": o.detach() for k, o in enumerate(outputs)}
            used = [(outputs[i], t) for i, t in zip(convention.differentiable, tangents, strict=True) if t is not None]
            given = getattr(plain, "inputs", ())
            first = convention.num_parameters + convention.num_buffers
            leaves = {f"gradient of {names[i]}": session.sources[i] for i in compared.parameters}
            leaves |= {f"gradient of {names[i]}": given[i - first] for i in compared.inputs if i - first < len(given)}
            if leaves and used:
                gradients = torch.autograd.grad([o for o, _ in used], [*leaves.values()], [t for _, t in used], allow_unused=True)
                found |= dict(zip(leaves, gradients, strict=True))
                for i in compared.parameters:
                    _add_old(found, f"gradient of {names[i]}", session.old_gradients.get(i))
        return found | {f"buffer {names[i]}": session.sources[i].data.clone() for i in session.old_buffers}
    finally:
        for i, value in present.items():
            session.sources[i].data.copy_(value)
        set_state(device, numbers)


def _outputs_made(session: Session, leaves: list[Any]) -> list[torch.Tensor]:
    """Of the plain model's outputs those that the step produces."""
    expected = session.captured.convention.outputs
    if any(isinstance(o, LeftOut) for o in expected):
        leaves = [x for x, o in zip(leaves, expected, strict=True) if not isinstance(o, LeftOut)]
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def _add_old(found: dict[str, torch.Tensor | None], name: str, old: torch.Tensor | None) -> None:
    """As autograd adds a gradient to the one from before."""
    if old is not None:
        gradient = found.get(name)
        found[name] = old if gradient is None else old.clone().add_(gradient)


def _find_worst(
    ours: dict[str, torch.Tensor | None], plain: dict[str, torch.Tensor | None], noise: dict[str, float], tolerance: float
) -> Verdict:
    """The tensor that differs most, by what its own noise allows."""
    found = _differences(ours, plain)
    if not found:
        return Verdict(identical=True, worst_fraction=0.0, where="", tolerance_fraction=tolerance)
    where = max(found, key=lambda name: found[name] / max(tolerance, 10 * noise.get(name, 0.0)))
    return Verdict(
        identical=False, worst_fraction=found[where], where=where, noise_fraction=noise.get(where, 0.0), tolerance_fraction=tolerance
    )


def _differences(ours: dict[str, torch.Tensor | None], plain: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """Per tensor that is in both and not the same in bits: the largest difference, as a fraction of the largest number."""
    return {name: _difference(ours[name], plain[name]) for name in ours if name in plain and not _same(ours[name], plain[name])}


def _same(ours: torch.Tensor | None, plain: torch.Tensor | None) -> bool:
    """In bits, or with what is no number in the same places."""
    if ours is None or plain is None:
        return ours is plain
    if ours.shape != plain.shape:
        return False
    return torch.equal(ours, plain) or (
        torch.equal(ours.isnan(), plain.isnan()) and torch.equal(ours.nan_to_num(0.0), plain.nan_to_num(0.0))
    )


def _difference(ours: torch.Tensor | None, plain: torch.Tensor | None) -> float:
    if ours is None or plain is None or ours.shape != plain.shape:
        return float("inf")
    scale = plain.abs().max().double().item() if plain.numel() else 0.0
    difference = float((ours.double() - plain.double()).abs().max().item()) / max(scale, 1e-30)
    return float("inf") if difference != difference else difference
