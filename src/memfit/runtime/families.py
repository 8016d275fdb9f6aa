"""Calls that differ in nothing but sizes of their tensors (a batch padded to another length, a short last batch), and ways that serve all of them.

first call    captured as it is                     fit
other sizes   captured with these sizes left open   the second size costs two to three captures
more sizes    guards hold? served                   tens of milliseconds
              a further dimension varies? captured again, with that one open too
              else captured as it is, as ever
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.guards.turns import Turns
from memfit.core.errors import Unsupported
from memfit.runtime.graph_stepper import Way
from memfit.torch_private.symbolic import Varying

_MOST_REFUSALS = 2
"""Captures that may fail before sizes are left alone."""


@dataclass(slots=True)
class Family:
    """`sizes` are those of the first call; `found` are ways with open sizes, the last used first; `varying` is what was seen to vary."""

    sizes: tuple[torch.Size, ...]
    found: list[Way] = field(default_factory=list)
    varying: dict[int, frozenset[int]] = field(default_factory=dict)
    refusals: int = 0
    turns: Turns = field(default_factory=Turns)

    def find(self, local: Mapping[str, Any], tensors: tuple[torch.Tensor, ...]) -> Way | None:
        """The way that serves this call."""
        for position, way in enumerate(self.found):
            if way.serves(local, tensors):
                self.turns.served()
                self.found.insert(0, self.found.pop(position))
                return way
        return None

    def keep(self, way: Way) -> None:
        self.found.insert(0, way)
        del self.found[Turns.most :]

    def open_for(self, tensors: tuple[torch.Tensor, ...]) -> Varying | None:
        """What to leave open in a capture of this call; None where it is better captured as it is: it has the sizes of the first one, or a
        size of 0 or 1, which is a case of its own, or captures with open sizes failed or served one call only, again and again."""
        seen = dict(self.varying)
        for i, (tensor, size) in enumerate(zip(tensors, self.sizes, strict=True)):
            dims = frozenset(d for d, (now, first) in enumerate(zip(tensor.shape, size, strict=True)) if now != first)
            if dims:
                seen[i] = seen.get(i, frozenset()) | dims
        if self.refusals == 0:  # where lengths vary, so will the number of rows: the last batch is a short one
            seen = {i: seen.get(i, frozenset()) | _rows_of(tensors, i) for i in range(len(tensors))}
        alike = all(t.shape == size for t, size in zip(tensors, self.sizes, strict=True))
        if alike or self.refusals >= _MOST_REFUSALS or not all(_can_be_open(tensors[i], dims) for i, dims in seen.items()):
            return None
        try:
            self.turns.begin([])
        except Unsupported:
            return None
        self.varying = {i: dims for i, dims in seen.items() if dims}
        return self.varying


def _rows_of(tensors: tuple[torch.Tensor, ...], i: int) -> frozenset[int]:
    """The first dimension of a tensor, if it is that of a batch: all tensors have as many rows."""
    rows = {t.shape[0] if t.dim() else 0 for t in tensors}
    return frozenset({0}) if len(rows) == 1 and tensors[i].dim() and tensors[i].shape[0] > 1 else frozenset()


def _can_be_open(tensor: torch.Tensor, dims: frozenset[int]) -> bool:
    return tensor.is_contiguous() and all(tensor.shape[d] > 1 for d in dims)
