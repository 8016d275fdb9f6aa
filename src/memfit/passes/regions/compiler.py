"""What capture asks of a compiler of regions. The one that exists is Inductor, in `compilers/inductor/compiler.py`; without one ops run as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from memfit.kernels.compiler import Compiles


class Compiler(Compiles, Protocol):
    """Says how to trace for it, which ops it fuses, and compiles a piece of the step."""

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Ops to trace as something else."""
        ...

    def improve(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """The compiler's own passes over the whole traced step."""
        ...

    def fuses(self, target: Any) -> bool:
        """Whether the compiler makes its own kernels for an op, so that neighbours share them."""
        ...

    def together(self) -> AbstractContextManager[Callable[[], bool]]:
        """Around many calls of `compile`, whose results run only after: for doing the slow part of all of them at once.

        Gives a function to call while waiting for something else; it says whether nothing is left to do."""
        ...
