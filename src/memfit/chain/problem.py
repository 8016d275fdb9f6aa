"""What a backpropagation chain costs: its length, its step costs, and the storage levels a state can wait in.

    F_0    F_1          F_{l-1}
x_0 ──> x_1 ──> ... ────────> x_l
 │       │                     │              B_i needs x_i and y_{i+1}
y_0 <── y_1 <── ... <──────── y_l <── seed    B_l ... B_0: l + 1 backward steps
    B_0    B_1                   B_l

States have one size; the working buffer holds one state, and x_0 starts there and nowhere else. Level k keeps `slots`
states, each written for `write_cost` and read for `read_cost`. Costs are in seconds, or in any one unit throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from memfit.core.errors import BadInput
from memfit.core.units import parse_bytes

EXACT_FLOAT = 2.0**53  # integers up to here are exact in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLevel:
    """A place for states. `slots` None is as many as anybody wants."""

    slots: int | None
    write_cost: float = 0.0
    read_cost: float = 0.0

    def __post_init__(self) -> None:
        if self.slots is not None and (isinstance(self.slots, bool) or int(self.slots) != self.slots or self.slots < 0):
            raise BadInput(f"a storage level has {self.slots!r} slots: give a whole number of states, 0 or more, or None for no limit.")
        for name, cost in (("write", self.write_cost), ("read", self.read_cost)):
            _check_cost(f"{name} cost of a storage level", cost)

    @staticmethod
    def of_bytes(capacity: int | str | None, state_bytes: int, *, write_cost: float = 0.0, read_cost: float = 0.0) -> StorageLevel:
        """A level given by its capacity: as many whole states as fit."""
        if state_bytes <= 0:
            raise BadInput(f"a state has {state_bytes} bytes: states that are counted against a capacity need at least 1.")
        slots = None if capacity is None else parse_bytes(capacity, what="capacity") // state_bytes
        return StorageLevel(slots=slots, write_cost=write_cost, read_cost=read_cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """`num_steps` forwards F_0 … F_{l-1} and `num_steps + 1` backwards B_l … B_0."""

    num_steps: int
    levels: tuple[StorageLevel, ...]
    forward_cost: float = 1.0
    backward_cost: float = 1.0
    state_bytes: int = 1
    adjoint_bytes: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, bool) or int(self.num_steps) != self.num_steps or self.num_steps < 0:
            raise BadInput(f"a chain of {self.num_steps!r} steps: give a whole number, 0 or more.")
        _check_cost("forward cost", self.forward_cost)
        _check_cost("backward cost", self.backward_cost)
        dearest = max(self.forward_cost, self.backward_cost, *(c for x in self.levels for c in (x.write_cost, x.read_cost)), 0.0)
        if float(self.num_steps + 1) * float(self.num_steps + 3) * dearest > 1e300:
            raise BadInput(f"{self.num_steps} steps at a cost of {dearest:g} add up to more than a float can hold: use a larger unit.")
        if self.state_bytes < 0 or self.adjoint_bytes < 0:
            raise BadInput(f"states of {self.state_bytes} and adjoints of {self.adjoint_bytes} bytes: sizes are 0 or more.")

    def capacity(self, level: int) -> int:
        """Slots of a level that can matter: no more than `num_steps` states are ever worth keeping, x_l never is."""
        slots = self.levels[level].slots
        return self.num_steps if slots is None else min(slots, self.num_steps)

    def is_unbounded(self, level: int) -> bool:
        slots = self.levels[level].slots
        return slots is None or slots >= self.num_steps


def single_level(num_steps: int, slots: int | None, *, forward_cost: float = 1.0, backward_cost: float = 1.0) -> Chain:
    """The classic problem: one free memory."""
    return Chain(num_steps=num_steps, levels=(StorageLevel(slots=slots),), forward_cost=forward_cost, backward_cost=backward_cost)


def _check_cost(what: str, cost: float) -> None:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not math.isfinite(cost) or cost < 0:
        raise BadInput(f"{what} is {cost!r}: costs are finite numbers, 0 or more.")


def to_fraction(cost: float) -> Fraction:
    """The number as it is written: 0.1 is 1/10, not the nearest binary fraction."""
    return Fraction(repr(cost) if isinstance(cost, float) else cost)


def find_exact_scale(chain: Chain) -> int:
    """A factor that makes every cost a whole number, or 1 when none keeps sums exact in float64.

    Tables of whole numbers compare without rounding, so "optimal" is not up to a rounding error.
    """
    costs = [chain.forward_cost, chain.backward_cost, *(c for x in chain.levels for c in (x.write_cost, x.read_cost))]
    fractions = [to_fraction(c) for c in costs]
    scale = math.lcm(*(f.denominator for f in fractions))
    worst = chain.num_steps + 1
    bound = (
        scale * float(max(fractions)) * worst * (worst + 3)
    )  # recompute-all with a write and a read each time is dearer than any optimum
    return scale if bound < EXACT_FLOAT else 1


def scale_costs(chain: Chain, scale: int) -> Chain:
    """The same chain with every cost multiplied by `scale`, exactly where that gives whole numbers."""

    def times(cost: float) -> float:
        return float(to_fraction(cost) * scale)

    if scale == 1:
        return chain
    levels = tuple(replace(x, write_cost=times(x.write_cost), read_cost=times(x.read_cost)) for x in chain.levels)
    return replace(chain, forward_cost=times(chain.forward_cost), backward_cost=times(chain.backward_cost), levels=levels)
