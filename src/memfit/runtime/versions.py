"""Version counters: what backward reads must be as forward left it, as autograd asks of what it saves.

    forward ── versions of all that is saved ──> ... ──> backward compares ── changed in place? ── refused in autograd's words

A plan that recomputes reads more than the plain model saves (a bias, the first weight): a change of those is refused too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.captured import Captured
from memfit.core.errors import Unsupported
from memfit.torch_private.autograd import versions_of
from memfit.torch_private.tensors import storage_key


class Versions:
    """Of the saved tensors, and of all sources, which a step that is repeated reads again. Keeps numbers, not tensors."""

    def __init__(self, captured: Captured, sources: tuple[torch.Tensor, ...], saved: Sequence[torch.Tensor]) -> None:
        self._captured, self._sources = captured, sources
        self._of_saved, self._of_sources = versions_of(saved), versions_of(sources)

    def require_same(self, saved: Sequence[torch.Tensor]) -> None:
        now = versions_of(saved)
        if now != self._of_saved:
            k = next(k for k, (a, b) in enumerate(zip(now, self._of_saved, strict=True)) if a != b)
            key = storage_key(saved[k])
            position = next((i for i, s in enumerate(self._sources) if storage_key(s) == key), None)
            raise _changed(saved[k], self._name(position), now[k], self._of_saved[k])

    def require_same_sources(self) -> None:
        i = self.find_changed_source()
        if i is not None:
            raise _changed(self._sources[i], self._name(i), versions_of(self._sources[i : i + 1])[0], self._of_sources[i])

    def find_changed_source(self) -> int | None:
        """The first that was changed; not of the buffers that forward changes, which are put back from copies."""
        now, free = versions_of(self._sources), {i for i, _ in self._captured.convention.mutations}
        return next((i for i, (a, b) in enumerate(zip(now, self._of_sources, strict=True)) if a != b and i not in free), None)

    def _name(self, position: int | None) -> str:
        if position is None:
            return "which is an output of the model"
        graph = self._captured.graph
        return f"which is {graph.tensors[self._captured.convention.sources[position]].name}"


def _changed(tensor: torch.Tensor, name: str, version: int, expected: int) -> Unsupported:
    return Unsupported(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], {name}, is at version {version}; expected version {expected} instead. The plan reads it "
        "again in backward: change it after backward, or change a copy."
    )
