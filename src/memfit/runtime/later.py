"""Outputs that a step left out, computed when somebody reads them: forward again as it ran, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.captured import LeftOutObject
from memfit.runtime.plain_calls import made_plain
from memfit.runtime.rng import get_state, set_state
from memfit.runtime.unread import Form, refuse_late, stand_in, stand_in_for_object
from memfit.runtime.versions import Versions


class Later:
    """What is needed for that: the step's tensors, random numbers and surroundings, and `whole`, which gives all outputs.

    Made before forward runs, whose random numbers it keeps; asked for stand-ins after.
    """

    def __init__(self, model: nn.Module, sources: tuple[torch.Tensor, ...], shape: Any, whole: Callable[[], Sequence[Any]]) -> None:
        self._model, self._sources, self._shape, self._whole = model, sources, shape, whole
        self._captured = shape.ready.captured
        self._numbers = get_state(self._captured.device)
        self._versions: Versions | None = None

    def stand_in(self, output: int, like: Form | LeftOutObject, beside: torch.Tensor | None) -> Any:
        """In the place of an output, now that forward has run. A gradient that comes through it is refused where `beside` is used."""
        if self._versions is None:
            self._versions = Versions(self._captured, self._sources, ())
        versions = self._versions
        if isinstance(like, LeftOutObject):
            return stand_in_for_object(like.kind, lambda: self._compute(output, versions), beside)
        assert beside is not None
        self._shape.note("outputs beside the loss are left out, and computed when they are read: the budget does not hold them")
        return stand_in(like, lambda: self._compute(output, versions).detach(), beside)

    def _compute(self, output: int, versions: Versions) -> Any:
        changed = versions.find_changed_source()
        if changed is not None:
            raise refuse_late(self._captured.graph.tensors[self._captured.convention.sources[changed]].name)
        buffers = [self._sources[i] for i, _ in self._captured.convention.mutations]
        before, device = [b.detach().clone() for b in buffers], self._captured.device
        present = get_state(device)
        set_state(device, self._numbers)
        try:
            with self._shape.moment.again(self._model), torch.no_grad(), made_plain():
                return self._whole()[output]
        finally:
            set_state(device, present)
            for buffer, old in zip(buffers, before, strict=True):
                buffer.data.copy_(old)
