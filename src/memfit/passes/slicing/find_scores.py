"""Finds what can run in slices of the rows around one wide product: every op that reads its scores, forward and backward.

    hidden, W ─> product ─> [scores: rows x classes] ─> softmax, sums over classes, gathers ... ─> a few numbers for each row      forward
    d hidden, d W, d bias <─ products, sums over rows <─ [d scores] <─ ...  <─ the same scores again                               backward

No form of loss is named here. From the product on every op is taken that reads or makes something as wide as the scores, with what lies
between two of these. Each must have an answer (`rules`): what it makes of a slice of the rows is that slice of what it makes, or is added
up over slices. What leaves the piece must be narrow. One op without an answer, and the product is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from memfit.core.graph import Op
from memfit.passes.slicing.analysis import Batch
from memfit.passes.slicing.parts import Block, PartFinder

NARROW = 1 / 16  # of the scores: what forward may give away
WIDER = 5  # times the hidden state's width: what scores have at least; layers in the middle of transformers have four
_WIDE = 2  # times the hidden state: from there on a value belongs to the scores


class ScoresFinder(PartFinder):
    """For one product: `product` is its op, `rows` the tensor whose rows it multiplies."""

    def __init__(self, batch: Batch, product: int, rows: int) -> None:
        super().__init__(batch)
        self.product = product
        (self.scores,) = self.graph.ops[product].outputs
        self._least = max(_WIDE * self._count(rows), int(NARROW * self._count(self.scores)))
        self._is_wide_enough = self._count(self.scores) >= WIDER * self._count(rows)
        self._below = self.depending((self.scores,))

    def block(self) -> Block | None:
        """The piece, or None where it is not all row by row."""
        found = self._grow() if self._is_wide_enough and self.batch.is_cut(self.scores) else None
        if found is None:
            return None
        wide, again = found
        forward = self._with_between({op for op in wide - again if op < self.boundary}) | again
        backward = self._with_between({op for op in wide if op > self.boundary})
        if any(op not in self.batch.answers for op in forward | backward):
            return None
        return self._cut_out(forward, backward, again)

    def _count(self, tensor: int) -> int:
        sample = self.captured.samples[tensor]
        return 0 if sample is None else sample.numel()

    def is_wide(self, tensor: int) -> bool:
        """Whether it has a place for each score, or for many of them."""
        return self.batch.is_cut(tensor) and self._count(tensor) >= self._least

    # -- which ops --------------------------------------------------------------------------------------------------

    def _grow(self) -> tuple[set[int], set[int]] | None:
        """Ops that read or make something wide; and of them those that do so without the product, such as targets with a place for each
        class: they are run again wherever they are read. None where one has no answer."""
        found: set[int] = set()
        pending = [self.product]
        while pending:
            op = pending.pop()
            node = self.graph.ops[op]
            if op in found or self._is_unread(node):
                continue
            found.add(op)
            if op not in self.batch.answers:
                return None
            for t in filter(self.is_wide, node.outputs):
                if t in self._below or op > self.boundary:
                    pending.extend(self.graph.readers[t])
            for t in filter(self.is_wide, node.inputs):
                pending.extend(m for m in self.graph.producers[t] if m in self.batch.answers)
        return found, {op for op in found if op < self.boundary and self._below.isdisjoint(self.graph.ops[op].outputs)}

    def _is_unread(self, op: Op) -> bool:
        return self.is_view(op) and self.kept.isdisjoint(op.outputs) and not any(self.graph.readers[t] for t in op.outputs)

    def _with_between(self, ops: set[int]) -> set[int]:
        """These, and what lies on a way from one of them to another."""
        if not ops:
            return set()
        span = self.graph.ops[min(ops) : max(ops) + 1]
        made: set[int] = set()
        for op in span:
            if op.id in ops or not made.isdisjoint(op.inputs):
                made.update(op.outputs)
        wanted: set[int] = set()
        between: set[int] = set()
        for op in reversed(span):
            if op.id in ops or not wanted.isdisjoint(op.outputs):
                wanted.update(op.inputs)
                if op.id in ops or not made.isdisjoint(op.outputs):
                    between.add(op.id)
        return between

    # -- what they are given and give -------------------------------------------------------------------------------

    def _cut_out(self, forward: set[int], backward: set[int], again: set[int]) -> Block | None:
        inside = {op for op in forward | backward if not self.is_remade(op) and op not in again}
        left = self.left(inside, set(), loose=again)
        wanted = {self.root[t] for op in left for t in self.graph.ops[op].inputs} | self.kept
        results, gradients = (self._made(own & inside, wanted) for own in (forward, backward))
        small = {v for v, op in self.maker.items() if op in inside & forward and not self.is_wide(v)}
        last = self.part(gradients, forward | backward, given=small)
        kept = {self.root[t] for t in last.inputs if self.maker.get(self.root[t]) in inside & forward}
        first = self.part((*results, *sorted(kept.difference(results))), forward)
        if not first.outputs or any(map(self.is_wide, (*first.outputs, *gradients))) or not self._is_narrow(first.outputs):
            return None
        left = self.left(inside, {*first.inputs, *last.inputs}.difference(first.outputs), loose=again)
        return Block(forward=first, backward=last if gradients else None, left=left)

    def _made(self, ops: set[int], wanted: set[int]) -> tuple[int, ...]:
        return tuple(v for v, op in self.maker.items() if op in ops and v in wanted)

    def _is_narrow(self, values: Iterable[int]) -> bool:
        return sum(map(self.size, values)) <= NARROW * self.size(self.scores)
