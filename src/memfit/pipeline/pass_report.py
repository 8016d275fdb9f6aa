"""What each pass does to one step: where it changed something, and how many bytes that can spare."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch

from memfit.capture.captured import Captured
from memfit.core.costs import uniform_costs
from memfit.core.graph import Graph, Op
from memfit.passes.interface import Level, Pass
from memfit.passes.run import watch_passes
from memfit.passes.table import PIPELINE, Slot
from memfit.pipeline.forms import Forms
from memfit.planning import plan as find_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """`places` that a pass changed; `saved_bytes`: of a form, how much lower the peak is that keeps everything; of choices, how much less
    has to be kept if all of them are taken; of a traced graph, of the values it makes. 0 where nothing changed or bytes grew."""

    slot: Slot
    places: int
    saved_bytes: int


def report_passes(forms: Forms) -> list[PassRow]:
    """A row for each pass of the engine's line, in its order; what needs measured costs is left out."""
    found: dict[str, tuple[int, int]] = {}

    def note(rewrite: Pass[Any], before: Any, after: Any) -> None:
        places, saved = _compare(rewrite.level, before, after)
        found[rewrite.name] = max(found.get(rewrite.name, (0, 0)), (places, saved))

    with watch_passes(note):
        for _ in forms.every():
            pass
    return [
        PassRow(slot=slot, places=places, saved_bytes=max(0, saved))
        for slot in PIPELINE[forms.engine]
        for places, saved in [found.get(slot.rewrite.name, (0, 0))]
    ]


def _compare(level: Level, before: Any, after: Any) -> tuple[int, int]:
    if level is Level.FX:
        return _count_new(_kinds(before), _kinds(after)), _made_bytes(before) - _made_bytes(after)
    if level is Level.STEP:
        return _count_new(_names(before), _names(after)), _whole_peak(before.graph) - _whole_peak(after.graph)
    return _count_new(_names(before), _names(after)), sum(_spared_bytes(after.graph, op) for op in after.graph.ops) - sum(
        _spared_bytes(before.graph, op) for op in before.graph.ops
    )


def _count_new(before: Counter[Any], after: Counter[Any]) -> int:
    return sum((after - before).values())


def _kinds(module: torch.fx.GraphModule) -> Counter[Any]:
    return Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function")


def _names(captured: Captured) -> Counter[Any]:
    """Ops as a reader knows them: ids are given anew by every pass."""
    return Counter((op.name, op.where, tuple(v.name for v in op.variants)) for op in captured.graph.ops)


def _made_bytes(module: torch.fx.GraphModule) -> int:
    nodes = (n for n in module.graph.nodes if n.op == "call_function" and n.target is not getitem)
    return sum(v.nbytes for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor) and not v._is_view())


def _whole_peak(graph: Graph) -> int:
    return find_plan(graph, uniform_costs(graph), None, planner="keep_all").require_plan().timeline.peak_bytes


def _spared_bytes(graph: Graph, op: Op) -> int:
    """Most that one of an op's other forms spares: what it reads less, and what it writes over; of an op that only makes again what
    another makes, that."""

    def size(tensors: set[int]) -> int:
        return sum(graph.storages[s].size_bytes for s in {graph.storage_of(t) for t in tensors})

    plain = set(op.inputs)
    spared = [size(plain - set(v.inputs)) - size(set(v.inputs) - plain) + size({old for _, old in v.inplace_of}) for v in op.variants]
    again = size({t for t in op.outputs if graph.producers[t][0] != op.id})
    return max([0, *spared]) + again
