"""Which tie order the exact search should try next: fixed ones, shaken ones, and children of those that got deepest.

    families       TW  TA  W  A  Z, each with or without flush-first
    shaken         a family's values times random factors; families whose runs get deep quickly are drawn more often
    bred           an order that got deepest so far, its positions shaken a little

How many buffers a short run manages to place before it is given up tells well how close its order is to one that solves
the problem, so orders are improved like any other solution. Where in the flow: used by `race.decide`.
Letters after MiniMalloc: T the heaviest load a buffer takes part in, W its lifetime, A its area, Z its size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.offsets.problem import Ints, Problem, load_at

_FAMILIES = ("TW", "TA", "W", "A", "Z")
_SHAKES = (0.0, 0.05, 0.1, 0.2, 0.4)
_BREEDING_SHAKES = (0.01, 0.03, 0.1)
_NUM_ELITES = 6
_EAGERNESS = 10.0  # how strongly families that get deep are preferred
_BREED_FRACTION = 0.35

Floats = NDArray[np.float64]


class Order(NamedTuple):
    """`rank[k]` is buffer k's place among equals; `family` is the position of the family it was drawn from.

    `fill`: whether the search prunes by FILL. With it a run sees further, without it it makes up to four times as many nodes in the
    same time; which of the two finds a packing differs from problem to problem.
    """

    rank: Ints
    flush_first: bool
    family: int
    fill: bool


@dataclass(slots=True)
class OrderSource:
    """Gives orders and learns from how deep they got. One for runs with FILL and one for runs without: depths do not compare."""

    problem: Problem
    random: np.random.Generator
    fill: bool = True
    total: Ints = field(init=False)
    values: dict[str, Floats] = field(init=False)
    families: list[tuple[str, bool]] = field(init=False)
    depth_sum: Floats = field(init=False)
    seconds: Floats = field(init=False)
    num_runs: Floats = field(init=False)
    elites: list[tuple[float, Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        load = load_at(self.problem)
        spans = zip(self.problem.start, self.problem.stop, strict=True)
        self.total = np.array([load[a:b].max() for a, b in spans], np.int64)
        life, size = np.log(self.problem.life.astype(np.float64)), np.log(self.problem.size.astype(np.float64))
        self.values = {"W": life, "A": life + size, "Z": size}
        self.families = [(name, flush) for flush, name in product((False, True), _FAMILIES)]
        self.depth_sum = np.full(len(self.families), 0.3)  # as if each had run once, neither well nor badly
        self.seconds = np.full(len(self.families), 0.05)
        self.num_runs = np.ones(len(self.families))

    def plain(self) -> list[Order]:
        """Every family's own order, not shaken."""
        return [self._make(k, 0.0) for k in range(len(self.families))]

    def draw(self) -> Order:
        """A shaken order of a promising family, or a child of an elite."""
        if self.elites and self.random.random() < _BREED_FRACTION:
            parent = self.elites[self.random.integers(len(self.elites))][1]
            return parent._replace(rank=self._shake_ranks(parent.rank))
        weight = np.exp(_EAGERNESS * self.depth_sum / self.num_runs) * self.num_runs / self.seconds
        return self._make(int(self.random.choice(len(weight), p=weight / weight.sum())), float(self.random.choice(_SHAKES)))

    def report(self, order: Order, depth_fraction: float, seconds: float) -> None:
        """How deep a run from this order got and how long it took: deep and quick families are drawn more often."""
        self.depth_sum[order.family] += depth_fraction
        self.seconds[order.family] += seconds
        self.num_runs[order.family] += 1
        self.elites.append((depth_fraction, order))
        self.elites.sort(key=lambda e: -e[0])
        del self.elites[_NUM_ELITES:]

    @property
    def typical_seconds(self) -> float:
        return float(np.median(self.seconds / self.num_runs))

    def _make(self, family: int, shake: float) -> Order:
        name, flush_first = self.families[family]
        value = self.values[name[-1]] + shake * self.random.standard_normal(self.problem.num_buffers)
        keys = (-self.values["Z"], -value, -self.total) if name[0] == "T" else (-self.values["Z"], -value)
        return Order(rank=_ranks(np.lexsort(keys)), flush_first=flush_first, family=family, fill=self.fill)

    def _shake_ranks(self, rank: Ints) -> Ints:
        shake = self.random.choice(_BREEDING_SHAKES) * len(rank)
        return _ranks(np.argsort(rank + shake * self.random.standard_normal(len(rank)), kind="stable"))


def _ranks(order: Ints) -> Ints:
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank
