"""Ops whose kernels lay their results out otherwise than tracing said: found in the first step, and copied into the traced layout from then on.

Views and kernels behind such an op were traced for the layout that was expected; torch's rules for shapes are not right for every kernel
and every mixture of layouts.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.captured import Captured
from memfit.kernels.layouts import lay_out, lies_in


class TracedLayouts:
    """Gives what ops make in its traced layout, and keeps in mind which tensors had to be copied."""

    def __init__(self, captured: Captured) -> None:
        self._samples = captured.samples
        self.found: set[int] = set()

    def __call__(self, tensor: int, made: Any) -> Any:
        sample = self._samples[tensor]
        if sample is None or not isinstance(made, torch.Tensor) or made.shape != sample.shape or lies_in(made, sample.stride()):
            return made
        self.found.add(tensor)
        return lay_out(made, sample.stride())
