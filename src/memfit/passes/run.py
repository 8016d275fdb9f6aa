"""Running passes: one after another, each on what the one before gave; whoever wants to may look in between.

value ─ pass ─> value ─ pass ─> value          watch_passes(look): look(pass, before, after) wherever one changed something
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from memfit.capture.captured import Captured
from memfit.passes.interface import Context, Level, Numbers, Pass
from memfit.passes.table import PIPELINE, Use

T = TypeVar("T")
Look = Callable[[Pass[Any], Any, Any], None]
_looking: list[Look] = []


@contextmanager
def watch_passes(look: Look) -> Iterator[None]:
    """Inside it `look(pass, before, after)` is told of every rewrite."""
    _looking.append(look)
    try:
        yield
    finally:
        _looking.remove(look)


def run_ways(rewrite: Pass[T], value: T, context: Context) -> Iterator[T]:
    """Each way in which a pass rewrites a value; none where it does not apply."""
    before: Any = copy_graph(value) if _looking and isinstance(value, torch.fx.GraphModule) else value
    for after in rewrite.run(value, context):
        for look in _looking:
            look(rewrite, before, after)
        yield after


def run_passes(passes: Iterable[Pass[T]], value: T, context: Context) -> T:
    """All of them, each in its first way."""
    for rewrite in passes:
        value = next(run_ways(rewrite, value, context), value)
    return value


def offer_choices(captured: Captured, engine: str, context: Context, *, numbers: frozenset[Numbers] = frozenset(Numbers)) -> Captured:
    """The step with other forms of its ops, of those that the engine offers the planner as choices."""
    slots = (slot for slot in PIPELINE[engine] if slot.use is Use.CHOICE and slot.rewrite.numbers in numbers)
    rewritten: Captured = run_passes((slot.rewrite for slot in slots), captured, context)
    return rewritten


def rewrite_traced(module: torch.fx.GraphModule, engine: str, context: Context) -> torch.fx.GraphModule:
    """A traced graph by all FX passes of an engine; the graph that is given stays as it was."""
    passes = (slot.rewrite for slot in PIPELINE[engine] if slot.rewrite.level is Level.FX)
    rewritten: torch.fx.GraphModule = run_passes(passes, copy_graph(module), context)
    return rewritten


def copy_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """New nodes; what they describe is shared."""
    graph = torch.fx.Graph()
    result = graph.graph_copy(module.graph, {})
    (before,) = module.graph.find_nodes(op="output")
    graph.output(result).meta = dict(before.meta)
    return torch.fx.GraphModule(module, graph)
