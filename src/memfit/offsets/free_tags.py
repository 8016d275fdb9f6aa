"""Static memory planning with free tags and liveness counters: the register allocation of tensor programs.

    a ──mul──> t0 ──add──> t1 ──exp──> out        counters: readers of each value that have yet to run
    b ──┘                                         t0 has one reader left, and add may overwrite it: t1 takes t0's tag
                                                  no reader left: the tag goes into the box of free tags

Walk the ops in order. A value's tag is freed when its counter reaches zero. An output takes over the tag of an input that
nobody else needs and that the op may overwrite; else the smallest free tag that is large enough; else, with `grow`, the
largest free tag is enlarged; else a new tag is made. Offsets follow by stacking the tags.

Where in the flow: the classic baseline (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", after register
allocation), and all that a runtime needs that hands out whole buffers. `pack` is at least as low and mostly lower, since it
may put two small buffers where a large one was.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from memfit.core.errors import BadInput
from memfit.core.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """`tag_of[s]` is the tag of storage s, or -1 for what the caller holds; `tag_bytes` their sizes."""

    tag_of: tuple[int, ...]
    tag_bytes: tuple[int, ...]
    num_inplace: int

    @property
    def total_bytes(self) -> int:
        return sum(self.tag_bytes)


def colour_graph(
    graph: Graph, order: Collection[int] | None = None, *, may_overwrite: Collection[int] = (), share: bool = True, grow: bool = True
) -> Colouring:
    """Tags for every storage that the ops of `order` (default: all, as listed) make, each op once.

    `may_overwrite` names ops that can write their output over an input (elementwise ones). What the graph itself declares
    in place takes over its input's tag in any case. With `share=False` every storage has a tag of its own.
    """
    steps = list(range(len(graph.ops))) if order is None else list(order)
    if len(set(steps)) != len(steps):
        raise BadInput("an op appears twice: colouring is for programs that run each op once; use layout_plan for recomputation.")
    walk = _Walk(graph, Counter(), frozenset(may_overwrite), share, grow)
    for op in steps:
        walk.counter.update({graph.storage_of(t) for t in graph.ops[op].inputs})
    walk.counter.update({graph.storage_of(t) for t in graph.results})  # the caller is a reader that never runs
    for op in steps:
        walk.run(op)
    tags = [walk.tag_of.get(s.id, -1) for s in graph.storages]
    return Colouring(tag_of=tuple(tags), tag_bytes=tuple(walk.sizes), num_inplace=walk.num_inplace)


@dataclass(slots=True)
class _Walk:
    graph: Graph
    counter: Counter[int]  # storage -> readers yet to run
    may_overwrite: frozenset[int]
    share: bool
    grow: bool
    tag_of: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    box: list[tuple[int, int]] = field(default_factory=list)  # (bytes, tag) of free tags, smallest first
    num_inplace: int = 0

    def run(self, op: int) -> None:
        """Tags for the outputs of one op, then count it off its inputs and free what nobody needs any more."""
        graph = self.graph
        inputs = {graph.storage_of(t) for t in graph.ops[op].inputs}
        declared = {graph.storage_of(new): graph.storage_of(old) for new, old in graph.ops[op].inplace_of}
        fresh = [s for s in dict.fromkeys(graph.storage_of(t) for t in graph.ops[op].outputs) if s not in inputs and s not in self.tag_of]
        taken: set[int] = set()
        for storage in fresh:
            victim = declared.get(storage)
            if victim is None and op in self.may_overwrite and self.share:
                victim = self._victim(storage, inputs - taken)
            if victim is not None:
                taken.add(victim)
                self.num_inplace += 1
                if victim in self.tag_of:
                    self.tag_of[storage] = self.tag_of[victim]
            else:
                self.tag_of[storage] = self._take(graph.storages[storage].size_bytes)
        self.counter.subtract(inputs)
        for storage in [*inputs, *fresh]:  # an output nobody reads is free at once
            if self.counter[storage] == 0 and storage not in taken and storage in self.tag_of and self.share:
                insort(self.box, (self.sizes[self.tag_of[storage]], self.tag_of[storage]))

    def _victim(self, storage: int, inputs: set[int]) -> int | None:
        """An input that may be overwritten: ours, of sufficient size, and this op is its only remaining reader."""
        size = self.graph.storages[storage].size_bytes
        able = [s for s in inputs if self.counter[s] == 1 and s in self.tag_of and self.sizes[self.tag_of[s]] >= size > 0]
        return min(able, key=lambda s: (self.sizes[self.tag_of[s]], s), default=None)

    def _take(self, size: int) -> int:
        at = bisect_left(self.box, (size, -1))
        if at < len(self.box):
            return self.box.pop(at)[1]
        if self.grow and self.box:
            tag = self.box.pop()[1]
            self.sizes[tag] = size
            return tag
        self.sizes.append(size)
        return len(self.sizes) - 1
