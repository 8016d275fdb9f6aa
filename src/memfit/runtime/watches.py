"""Who looks on at a step that is not an ordinary one: the first of a shape, one that is compared, one that looks how results lie.

A session calls `forward` and `backward` around the two halves, and `done` when both are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from memfit.runtime.autograd_step import Ready, Session, source_bytes
from memfit.runtime.gradients import GradientSink, Tangents
from memfit.torch_private.allocations import meter
from memfit.torch_private.tensors import is_profiling


class Shape(Protocol):
    """What is known about one shape of the call: its plan."""

    ready: Ready

    def settle_layouts(self, ready: Ready) -> None: ...


class Judge(Protocol):
    """Whom a watch tells: the stepper."""

    def settle(self, shape: Any, measured: int) -> None: ...

    def compare(self, shape: Any, session: Session, tangents: Tangents, sink: GradientSink, plain: Callable[[], Any]) -> None: ...


class Look:
    """Watches a step that looks at the layout of results because no step before it was run to its end."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.ready = shape, shape.ready

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def done(self, session: Session, tangents: Tangents, sink: GradientSink) -> None:
        self.shape.settle_layouts(self.ready)
        session.forget_trial()


class Comparison(Look):
    """Watches a step that is compared with the plain model and not measured."""

    def __init__(self, judge: Judge, shape: Shape, plain: Callable[[], Any]) -> None:
        super().__init__(shape)
        self.judge, self.plain = judge, plain

    def done(self, session: Session, tangents: Tangents, sink: GradientSink) -> None:
        try:
            self.shape.settle_layouts(self.ready)
            self.judge.compare(self.shape, session, tangents, sink, self.plain)
        finally:
            session.forget_trial()


class Trial(Comparison):
    """Watches the first step of a shape: measures its peak, if told to, sees how results lie, then has it compared with the plain model."""

    def __init__(self, judge: Judge, shape: Shape, plain: Callable[[], Any], *, measures: bool = True) -> None:
        super().__init__(judge, shape, plain)
        self.measures = measures
        self.device = shape.ready.captured.device
        self.left = 0
        self.peak: int | None = None
        self.held_before = source_bytes(shape.ready.captured) + shape.ready.elsewhere_bytes
        if self.device.type == "cuda":  # whatever else the process holds counts against the budget too
            self.held_before = max(self.held_before, torch.cuda.memory_allocated(self.device))

    def forward(self) -> AbstractContextManager[None]:
        return self._measured()

    def backward(self) -> AbstractContextManager[None]:
        return self._measured()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        if not self.measures or is_profiling():  # the user's own profiler is left alone
            yield
            return
        counter = meter(self.device)
        counter.start()
        try:
            yield
        finally:
            left, peak = counter.stop()
            self.peak = max(self.peak or 0, self.left + peak)
            self.left += left

    def done(self, session: Session, tangents: Tangents, sink: GradientSink) -> None:
        try:
            if self.peak is not None:
                self.judge.settle(self.shape, self.held_before + self.peak)
        except BaseException:
            session.forget_trial()
            raise
        super().done(session, tangents, sink)
