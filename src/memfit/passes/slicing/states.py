"""How values and arguments of an op stand to slices of the batch: the words in which `batch_rules` answers.

Split(dim, rows)   dimension `dim` holds the samples one after another, `rows` places for each: slices are pieces of it
WHOLE              the same for every slice: weights, constants
SUMMED             the sum of what the slices give: gradients of weights
UNIFORM            one number everywhere (`full`): made anew in whatever size a reader wants
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.torch_private.trees import leaves_of


@dataclass(frozen=True, slots=True)
class Split:
    """Sample i lies at [i * rows, (i + 1) * rows) of dimension `dim`."""

    dim: int
    rows: int


class Same(Enum):
    WHOLE = "whole"
    SUMMED = "summed"
    UNIFORM = "uniform"


WHOLE, SUMMED, UNIFORM = Same.WHOLE, Same.SUMMED, Same.UNIFORM
State = Split | Same


@dataclass(frozen=True, slots=True)
class Rows:
    """Among the arguments of a sliced op: this many for each sample of the slice."""

    each: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`makes`: a state for each output. `takes`: what readers of uniform tensors want them to be; `args`: with `Rows` for sizes."""

    makes: tuple[State, ...]
    args: tuple[Any, ...]
    takes: Mapping[int, State]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One op: its call, and of the tensors that it reads and makes samples and states."""

    call: OpCall
    batch: int
    samples: Mapping[int, torch.Tensor]
    states: Mapping[int, State]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.call.args

    def sample(self, position: int) -> torch.Tensor:
        return self.samples[self.args[position].tensor]

    def state(self, position: int) -> State | None:
        """Of an argument; None where no tensor is given."""
        value = self.args[position] if position < len(self.args) else None
        return self.states[value.tensor] if isinstance(value, Ref) else None

    def split(self, position: int = 0) -> Split | None:
        found = self.state(position)
        return found if isinstance(found, Split) else None

    def made(self, position: int = 0) -> torch.Tensor:
        output = self.call.outputs[position]
        assert output is not None
        return self.samples[output]

    def given(self) -> Iterator[tuple[int, State]]:
        for value in leaves_of((self.args, dict(self.call.kwargs))):
            if isinstance(value, Ref):
                yield value.tensor, self.states[value.tensor]

    def are_whole(self, *positions: int) -> bool:
        """Whether these arguments are whole or not given."""
        return all(self.state(p) in (None, WHOLE) for p in positions)

    def answer(self, *makes: State, args: tuple[Any, ...] | None = None, takes: Mapping[int, State] | None = None) -> Answer | None:
        """None where another tensor than those that the rule looked at would have to be cut, or is not there yet."""
        wanted = takes or {}
        if any(state is SUMMED or (state is UNIFORM and t not in wanted) for t, state in self.given()):
            return None
        return Answer(makes=makes, args=self.args if args is None else args, takes=wanted)

    def sized(self, state: Split, position: int = 0) -> list[Any]:
        """The sizes of an output whose dimension counts samples."""
        return [Rows(state.rows) if d == state.dim else n for d, n in enumerate(self.made(position).shape)]
