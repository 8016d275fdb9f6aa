"""What a step costs at a size at which nothing was measured: as at the nearest measured size, each op by the bytes it reads and writes.

measured at 512 ── the same ops at 333? ── time by bytes; workspace as at 512
measured at 512 ── 600 ──────────────────  time and workspace by bytes
                └─ far above ────────────  nothing: it has to be measured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from memfit.capture.captured import Captured
from memfit.core.costs import Costs
from memfit.core.graph import Graph

_REACH = 1.5
"""Of all bytes of the largest measured size: from there on a size is measured itself, lest a workspace be taken for too small."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A form of the step at one size, with measured costs."""

    graph: Graph
    costs: Costs

    @cached_property
    def total_bytes(self) -> int:
        return sum(s.size_bytes for s in self.graph.storages)

    @cached_property
    def op_bytes(self) -> list[int]:
        return count_op_bytes(self.graph)


def scale_costs(captured: Captured, measured: Sequence[Priced]) -> Costs | None:
    """The costs of a step; None where no measured one has the same ops, or all are far smaller."""
    alike = [priced for priced in measured if have_same_ops(priced.graph, captured.graph)]
    total = sum(s.size_bytes for s in captured.graph.storages)
    larger = [priced for priced in alike if priced.total_bytes >= total]
    nearest = min(larger, key=lambda p: p.total_bytes) if larger else max(alike, key=lambda p: p.total_bytes, default=None)
    if nearest is None or total > _REACH * nearest.total_bytes:
        return None
    ratios = [now / max(1, then) for now, then in zip(count_op_bytes(captured.graph), nearest.op_bytes, strict=True)]
    return _scaled(nearest.costs, ratios, captured)


def _scaled(costs: Costs, ratios: list[float], captured: Captured) -> Costs:
    growth = [max(1.0, ratio) for ratio in ratios]  # what a kernel takes for itself need not shrink with its tensors
    return replace(
        costs,
        op_time_ns=tuple([round(ns * r) for ns, r in zip(costs.op_time_ns, ratios, strict=True)]),
        workspace_bytes=captured.put_in_fixed_workspace([ceil(size * g) for size, g in zip(costs.workspace_bytes, growth, strict=True)]),
        variant_time_ns=tuple([tuple([round(ns * r) for ns in row]) for row, r in zip(costs.variant_time_ns, ratios, strict=True)]),
        variant_workspace_bytes=tuple(
            [tuple([ceil(size * g) for size in row]) for row, g in zip(costs.variant_workspace_bytes, growth, strict=True)]
        ),
        graph_digest=captured.graph.digest,
    )


def count_op_bytes(graph: Graph) -> list[int]:
    """Per op the bytes of what it reads and makes."""
    sizes = [graph.storages[t.storage].size_bytes for t in graph.tensors]
    return [sum([sizes[t] for t in (*op.inputs, *op.outputs)]) for op in graph.ops]


def have_same_ops(one: Graph, other: Graph) -> bool:
    """Whether two graphs differ in nothing but the sizes of their storages."""
    if len(one.ops) != len(other.ops) or one.sources != other.sources or one.results != other.results:
        return False
    if one.storage_ids != other.storage_ids:
        return False
    return all(
        a.name == b.name and a.inputs == b.inputs and a.outputs == b.outputs and a.inplace_of == b.inplace_of and a.variants == b.variants
        for a, b in zip(one.ops, other.ops, strict=True)
    )
