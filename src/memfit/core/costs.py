"""What ops and copies cost on one device: time and workspace per op form, bandwidth and latency per memory level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.units import MAX_SUM

DEVICE, HOST, DISK = 0, 1, 2
"""Memory levels: where the step computes, and where copies can wait. Chains may use more levels than these."""


def level_name(level: int) -> str:
    return ("device", "host", "disk")[level] if level < 3 else f"level {level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The link between the device and one other level. Zero bandwidth means the copy costs only its latency."""

    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0
    write_latency_ns: int = 0
    read_latency_ns: int = 0

    def write_ns(self, size_bytes: int) -> int:
        return self.write_latency_ns + _transfer_ns(size_bytes, self.write_bytes_per_s)

    def read_ns(self, size_bytes: int) -> int:
        return self.read_latency_ns + _transfer_ns(size_bytes, self.read_bytes_per_s)


def _transfer_ns(size_bytes: int, bytes_per_s: float) -> int:
    return round(size_bytes * 1e9 / bytes_per_s) if bytes_per_s > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """`op_time_ns[i]` and `workspace_bytes[i]` are for op i as written; `variant_*[i][v - 1]` for its variant v.

    `levels[0]` is the host, `levels[1]` the disk, further ones as a chain needs them.
    """

    op_time_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    variant_time_ns: tuple[tuple[int, ...], ...] = ()
    variant_workspace_bytes: tuple[tuple[int, ...], ...] = ()
    levels: tuple[Level, ...] = ()
    device: str = ""
    graph_digest: str = ""

    def __post_init__(self) -> None:
        flat = [*self.op_time_ns, *self.workspace_bytes]
        for nested in (*self.variant_time_ns, *self.variant_workspace_bytes):
            flat.extend(nested)
        if flat and min(flat) < 0:
            raise BadInput(f"costs hold a negative value ({min(flat)}): times and workspaces are at least 0.")
        if flat and max(flat) >= MAX_SUM:
            raise BadInput(
                f"costs hold {max(flat)}, which is 2**62 or more: times are in nanoseconds, workspaces in bytes; check the unit."
            )
        for level in self.levels:
            _check_level(level)

    def time_ns(self, op: int, variant: int = 0) -> int:
        return self.op_time_ns[op] if variant == 0 else self.variant_time_ns[op][variant - 1]

    def workspace(self, op: int, variant: int = 0) -> int:
        return self.workspace_bytes[op] if variant == 0 else self.variant_workspace_bytes[op][variant - 1]

    def keep_forms(self, kept: Sequence[Sequence[int]], graph: Graph) -> Costs:
        """The costs of these forms of each op, the first of them as the plain one; `graph` has no others."""
        return replace(
            self,
            op_time_ns=tuple(self.time_ns(op, forms[0]) for op, forms in enumerate(kept)),
            workspace_bytes=tuple(self.workspace(op, forms[0]) for op, forms in enumerate(kept)),
            variant_time_ns=tuple(tuple(self.time_ns(op, v) for v in forms[1:]) for op, forms in enumerate(kept)),
            variant_workspace_bytes=tuple(tuple(self.workspace(op, v) for v in forms[1:]) for op, forms in enumerate(kept)),
            graph_digest=graph.digest,
        )


def _check_level(level: Level) -> None:
    for bandwidth in (level.write_bytes_per_s, level.read_bytes_per_s):
        if bandwidth != 0 and not 1e-9 <= bandwidth <= 1e300:
            raise BadInput("a memory level has a bandwidth outside 1e-9 to 1e300 bytes per second: correct it; 0 means latency alone.")
    for latency in (level.write_latency_ns, level.read_latency_ns):
        if not 0 <= latency < MAX_SUM:
            raise BadInput(f"a memory level has a latency of {latency} ns: give a whole number of at least 0 and below 2**62.")


def uniform_costs(graph: Graph, *, time_ns: int = 1) -> Costs:
    """Every op takes the same time and no workspace: for judging memory alone."""
    return Costs(
        op_time_ns=(time_ns,) * len(graph.ops),
        workspace_bytes=(0,) * len(graph.ops),
        variant_time_ns=tuple((time_ns,) * len(op.variants) for op in graph.ops),
        variant_workspace_bytes=tuple((0,) * len(op.variants) for op in graph.ops),
        graph_digest=graph.digest,
    )


def check_costs(graph: Graph, costs: Costs) -> None:
    """Refuse costs made for another graph, before they give nonsense."""
    if costs.graph_digest not in ("", graph.digest):
        raise BadInput(f"these costs belong to graph {costs.graph_digest[:12]}, not to {graph.digest[:12]}: profile this graph again.")
    if len(costs.op_time_ns) != len(graph.ops) or len(costs.workspace_bytes) != len(graph.ops):
        raise BadInput(
            f"costs for {len(costs.op_time_ns)} op times and {len(costs.workspace_bytes)} workspaces given, the graph has "
            f"{len(graph.ops)} ops: profile this graph again."
        )
    for label, nested in (("variant_time_ns", costs.variant_time_ns), ("variant_workspace_bytes", costs.variant_workspace_bytes)):
        counts = tuple(map(len, nested)) or (0,) * len(graph.ops)
        for op, count in zip(graph.ops, counts, strict=False):
            if count != len(op.variants):
                raise BadInput(
                    f"{label} has {count} entries for op {op.id}, which has {len(op.variants)} variants: profile this graph again."
                )
        if len(counts) != len(graph.ops):
            raise BadInput(f"{label} covers {len(counts)} ops, the graph has {len(graph.ops)}: profile this graph again.")


def check_sums(graph: Graph, costs: Costs) -> None:
    """Refuse what does not add up inside 64 bits, before anything is planned with it."""
    total_ns = sum(costs.op_time_ns) + sum(map(sum, costs.variant_time_ns))
    if total_ns >= MAX_SUM:
        raise BadInput(f"the ops take {total_ns} ns together, which is 2**62 or more: times are in nanoseconds; check the unit.")
    widest = max((*costs.workspace_bytes, *(w for row in costs.variant_workspace_bytes for w in row)), default=0)
    total_bytes = sum(storage.size_bytes for storage in graph.storages)
    if total_bytes + widest >= MAX_SUM:
        raise BadInput(f"storages of {total_bytes} bytes and a workspace of {widest} are 2**62 or more together: check the unit.")
    for number, level in enumerate(costs.levels, 1):
        copies_ns = sum(level.write_ns(s.size_bytes) + level.read_ns(s.size_bytes) for s in graph.storages)
        if copies_ns >= MAX_SUM:
            raise BadInput(
                f"copying every storage to the {level_name(number)} and back takes {copies_ns} ns, which is 2**62 or more: check its bandwidth, "
                "in bytes per second."
            )
