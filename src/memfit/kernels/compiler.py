"""What turns a graph of ops into something that runs, for implementations that are made of ops: Inductor, or PyTorch op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled graph: from a list of its inputs to its outputs."""


class Compiles(Protocol):
    """Turns a graph of ops into something that runs."""

    def compile(self, module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Run:
        """What gives the outputs, with the strides they have in `module`."""
        ...


@dataclass(frozen=True, slots=True)
class PlainOps:
    """PyTorch's own kernels, one after another. Code that fx writes drops each value after its last reader."""

    def compile(self, module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Run:
        def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            made: Sequence[torch.Tensor] = module(*inputs)
            return made

        return run
