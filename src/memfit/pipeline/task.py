"""What to train and in which forms: a model, how it is called, what surrounds its step, and the engine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit import __version__
from memfit.capture.capture import Traced, traced
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor import Inductor, compile_pieces, leave_mark, mark_of, wake_writers
from memfit.core.costs import Costs
from memfit.passes.regions.compiler import Compiler
from memfit.passes.regions.drop_dominated import without_dominated
from memfit.passes.regions.regions import with_regions
from memfit.passes.slicing.slice_blocks import SLICINGS, with_sliced_blocks
from memfit.passes.step.chunked_loss import has_large_loss, with_chunked_loss
from memfit.passes.step.concat_gradients import with_gradients_by_parts
from memfit.passes.step.fused_loss import with_fused_loss
from memfit.passes.variants.registry import add_variants, with_library_forms, with_sliced_convolutions
from memfit.profile.measure import measure_costs
from memfit.profile.roofline import roofline
from memfit.report.progress import Progress

_WORTH_COMPILING = 300  # ops of a step, traced for the compiler


@dataclass(frozen=True, kw_only=True)
class Task:
    """`engine`: "eager" runs PyTorch's own kernels, "inductor" compiled regions; "auto" compiles on CUDA what is large enough."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None
    num_targets: int = 0
    optimizer: torch.optim.Optimizer | None = None
    reserve_bytes: int = 0
    device: str | None = None
    allow: tuple[str, ...] = ("recompute", "variants")
    engine: str = "eager"

    def capture(self, call: Call, *, accumulates: bool = False) -> Captured:
        """The step as PyTorch runs it."""
        return self._captured(self._traced(call, None), accumulates, None)

    def offers(self, call: Call, *, accumulates: bool = False) -> Offers:
        """The forms of the step among which `choice.best_plan` chooses."""
        return Offers(self, call, accumulates)

    def _eager_offers(self, call: Call, accumulates: bool) -> Iterator[Captured]:
        """The step as it is, where bounds are tightest; then with variants that give the same bits; then with those that round
        otherwise; then with its loss in chunks, gradients of concatenations by parts, its widest block or its largest convolutions in
        slices: choices too large to make op by op."""
        plain = self._captured(self._traced(call, None), accumulates, None)
        yield plain
        if "variants" not in self.allow:
            return
        seen = {plain.graph.digest}
        wholes = (with_chunked_loss(plain), with_gradients_by_parts(plain))
        in_slices = (with_sliced_blocks(plain, None, lean=lean) for lean in (False, True))
        others = chain(wholes, *in_slices, [with_sliced_convolutions(plain)])
        for captured, rounding in chain(((plain, False), (plain, True)), ((form, True) for form in others)):
            offer = None if captured is None else add_variants(captured, rounding=rounding)
            if offer is not None and offer.graph.digest not in seen:
                seen.add(offer.graph.digest)
                yield offer

    def _compiled_offers(self, step: Traced, accumulates: bool, fine: Captured) -> Iterator[Captured]:
        """The step in regions, then with its loss fused. Gradients of concatenations come by parts: no more to compile, no slower."""
        if "variants" not in self.allow:
            yield with_regions(fine, Inductor(), choices=False)
            return
        yield _in_regions(fine)
        if has_large_loss(fine):
            fused = with_fused_loss(self._captured(step, accumulates, Inductor(pads=False)), Inductor())
            if fused is not None:
                yield _in_regions(fused)

    def _wake_writers(self, call: Call) -> None:
        """They take seconds to be of use, and tracing takes as long."""
        device = next((p.device for p in self.model.parameters()), None)
        if device is not None and not self._mark(call).exists():
            wake_writers(device)

    def leave_mark(self, call: Call) -> None:
        """Once the step is ready: its code is on disk from now on."""
        if self.compiles:
            leave_mark(self._mark(call))

    def _mark(self, call: Call) -> Path:
        return mark_of(self.model, call.tensors, (__version__, self.allow, type(self.optimizer), getattr(self.loss_fn, "__name__", "")))

    def _traced(self, call: Call, compiler: Compiler | None) -> Traced:
        return traced(
            self.model, call, loss_fn=self.loss_fn, num_targets=self.num_targets, gpu_attention=self.is_elsewhere, compiler=compiler
        )

    def _captured(self, step: Traced, accumulates: bool, compiler: Compiler | None) -> Captured:
        return step.captured(compiler, optimizer=self.optimizer, accumulates=accumulates, reserve_bytes=self.reserve_bytes)

    @cached_property
    def compiles(self) -> bool:
        """Whether steps are to be compiled: asked for, or on a GPU that is here."""
        return self.engine == "inductor" or (
            self.engine == "auto" and self.device is None and any(p.is_cuda for p in self.model.parameters())
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the costs are for a named GPU while the model is not on one."""
        return self.device not in (None, "cpu") and not any(p.is_cuda for p in self.model.parameters())

    def costed(self, captured: Captured, progress: Progress) -> tuple[Captured, Costs]:
        """Costs, measured on the model's own device or a roofline for the one that was named; without forms that never pay."""
        costs = self._costs(captured, progress)
        return without_dominated(captured, costs) if captured.compiled else (captured, costs)

    def _costs(self, captured: Captured, progress: Progress) -> Costs:
        if self.device is not None:
            return roofline(captured, self.device)
        if any(p.device.type == "meta" for p in self.model.parameters()):
            return roofline(captured, "cpu")
        return measure_costs(
            captured, progress=progress.update, build=lambda targets, calls: compile_pieces(targets, progress.update, calls)
        )


class Offers(Iterator[Captured]):
    """The usual forms of a step, one after another; with `in_slices` those that are slower where a usual one has a good plan.

    `fine` is the step traced for the compiler, None where it is not compiled: what all compiled forms are made of.
    """

    def __init__(self, task: Task, call: Call, accumulates: bool) -> None:
        self._task, self._call, self._accumulates = task, call, accumulates
        self._usual = self._every()

    def __next__(self) -> Captured:
        return next(self._usual)

    def _every(self) -> Iterator[Captured]:
        task = self._task
        if self.fine is None:
            yield from task._eager_offers(self._call, self._accumulates)
        else:
            assert self._step is not None
            yield from task._compiled_offers(self._step, self._accumulates, self.fine)

    @cached_property
    def _step(self) -> Traced | None:
        if not self._task.compiles:
            return None
        self._task._wake_writers(self._call)
        return self._task._traced(self._call, Inductor())

    @cached_property
    def fine(self) -> Captured | None:
        task, step = self._task, self._step
        fine = None if step is None else task._captured(step, self._accumulates, Inductor())
        return fine if fine is not None and (task.engine == "inductor" or len(fine.graph.ops) >= _WORTH_COMPILING) else None

    def in_slices(self) -> Iterator[Iterator[Captured]]:
        """A compiled step with the block it begins with run slice by slice of the batch: ways that hold less and less and take longer,
        each with the shortest block first, the only one that can pay where its plan repeats nothing. (Without a compiler they are among
        the usual forms.)"""
        if self.fine is not None and "variants" in self._task.allow:
            seen: set[str] = set()
            for num_slices, lean in SLICINGS:
                yield self._sliced(with_sliced_blocks(self.fine, Inductor(), num_slices=num_slices, lean=lean), seen)

    @staticmethod
    def _sliced(forms: Iterator[Captured], seen: set[str]) -> Iterator[Captured]:
        for sliced in forms:
            if sliced.graph.digest not in seen:
                seen.add(sliced.graph.digest)
                yield with_regions(with_library_forms(sliced), Inductor())

    def by_convolutions(self) -> Iterator[Captured]:
        """A compiled step with its largest convolutions in slices, each by itself: for budgets below what one of them takes."""
        sliced = with_sliced_convolutions(self.fine) if self.fine is not None and "variants" in self._task.allow else None
        if sliced is not None:
            yield with_regions(sliced, Inductor())


def _in_regions(fine: Captured) -> Captured:
    return with_regions(with_library_forms(with_gradients_by_parts(fine, Inductor()) or fine), Inductor())
