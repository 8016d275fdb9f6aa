"""What a pass is: one rewrite of a step, described so that a table can say what runs, when, and at what price.

    traced graph ─ FX passes ─> lowered step ─ STEP and OP passes ─> a step to plan

A pass gives each way to rewrite what it is given, and nothing where it does not apply. What it is given stays as it was. The table of all
passes, in the order in which they run, is `PIPELINE` in `table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from memfit.capture.captured import Captured, OpCall, Role
from memfit.core.graph import Op
from memfit.passes.regions.compiler import Compiler
from memfit.passes.rewriter import Rewriter

T = TypeVar("T")
Run = Callable[[T, "Context"], Iterable[T]]
Offer = Callable[[Rewriter, Op, OpCall], None]
"""Adds other forms of one op."""


class Level(Enum):
    """What a pass rewrites."""

    FX = "the traced graph"
    STEP = "the step"
    OP = "one op's forms"


class Numbers(Enum):
    """What a rewrite does to the numbers that come out."""

    SAME_BITS = "same bits"
    ROUNDS = "rounds otherwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a pass may know besides the step. `compiler`: what the step was traced for; None where ops run as they are.

    `variants`: whether the planner may choose between forms of an op. `least_fraction`, of all bytes of the step: from there
    on a value is worth a choice; without it `offer_at` decides.
    """

    compiler: Compiler | None = None
    variants: bool = True
    least_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(Generic[T]):
    """`where` and `becomes` say in a few words what is rewritten into what, `saves` what for.

    `reads_products`: whether it looks for matrix products as the model wrote them; a compiler does not pad them then. `may_apply` is a
    quick look at a step; a pass is not tried where it says no.
    """

    name: str
    where: str
    becomes: str
    saves: str
    level: Level
    numbers: Numbers
    run: Run[T]
    reads_products: bool = False
    may_apply: Callable[[Captured], bool] | None = None


def one_way(rewrite: Callable[[T], T | None]) -> Run[T]:
    """Of a rewrite that knows one way, gives None where it does not apply, and needs to know nothing besides."""

    def run(value: T, context: Context) -> Iterable[T]:
        found = rewrite(value)
        return () if found is None or found is value else (found,)

    return run


def in_place(change: Callable[[torch.fx.GraphModule], int]) -> Run[torch.fx.GraphModule]:
    """Of a change to a traced graph that says at how many places it was made. Who runs FX passes gives them a graph of their own."""

    def run(module: torch.fx.GraphModule, context: Context) -> Iterable[torch.fx.GraphModule]:
        return (module,) if change(module) else ()

    return run


_OF_ALL, _OF_LARGEST = 1 / 400, 1 / 20


def offer_at(offers: Mapping[Any, Offer]) -> Run[Captured]:
    """A rewrite that offers other forms of the ops with these targets, where their values are large: small ones are not worth a choice.

    Large is a fraction of all bytes of the step; in one traced for a compiler, where most values never exist, of the largest storage.
    """

    def run(captured: Captured, context: Context) -> Iterable[Captured]:
        rewriter = Rewriter(captured, least_bytes=_least_bytes(captured, context))
        for op, call in zip(captured.graph.ops, captured.calls, strict=True):
            offer = offers.get(call.target) if call.role is Role.CALL else None
            if offer is not None:
                offer(rewriter, op, call)
        found = rewriter.finish()
        return () if found is captured else (found,)

    return run


def _least_bytes(captured: Captured, context: Context) -> int:
    sizes = [s.size_bytes for s in captured.graph.storages]
    if context.least_fraction is not None:
        return max(1, int(sum(sizes) * context.least_fraction))
    return max(1, int(sum(sizes) * _OF_ALL if context.compiler is None else max(sizes, default=0) * _OF_LARGEST))
