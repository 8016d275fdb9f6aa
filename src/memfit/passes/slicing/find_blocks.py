"""Finds the start of a network that is worth running slice by slice of the batch: wide inside, narrow where it ends.

    x ─> [conv relu conv relu pool] ─> p, o ─> conv ─> ...           forward: only p and o, the pool's offsets, exist whole
    x, p, o ─> [conv relu, again;  pool' relu' conv' relu' conv'] <─ d p      backward: for each slice what is wide again, then gradients
                                          └─> d weights, summed

Convolutional networks are widest where they begin. Backward of a wide convolution holds its input, its output's gradient and its
input's gradient at once, and no order of whole ops avoids that; slices do, as long as samples do not depend on each other (no batch
norm, no dropout: `batch`). The part of backward that belongs to a block leads to the gradients of what the block reads, from the
first values on that were made without looking at any other part of the network. Backward makes again what is wide;
small values, such as what pools make of it, forward gives away beside its results (`lean`: none, all is made again from the inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

from torch.utils.flop_counter import flop_registry

from memfit.capture.captured import Role
from memfit.passes.slicing.analysis import Batch
from memfit.passes.slicing.parts import Block, Part, PartFinder
from memfit.passes.slicing.states import SUMMED, Split

_NARROW = 1 / 2  # of the widest value since the last border: what may cross this one
_FALLS = 2 / 3  # of the widest value before: what may come after, or nothing is won
_SMALL = 1 / 4  # of what it is made of: a value that forward may give away for backward
_WIDE = 1 / 4  # of the widest value: what a piece must have inside to be taken along


def find_blocks(batch: Batch, *, lean: bool = False) -> Iterator[Block]:
    """Blocks that begin where the network does, the shortest first. `lean`: nothing is kept inside one for its backward."""
    finder = _Finder(batch)
    for last in finder.cuts():
        block = finder.block(last, lean=lean)
        if block is not None:
            yield block


class _Finder(PartFinder):
    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.cut_by_input = self.depending(t for t in self.graph.sources if batch.is_cut(t))
        self.gradients = self.depending(self.captured.convention.tangents)
        self.origins = self._origins()
        self.good = self._good()

    def _origins(self) -> dict[int, frozenset[int]]:
        """Of values that depend on no sample: the sources that they are made of."""
        found = {t: frozenset([self.root[t]]) for t in self.graph.sources if t not in self.cut_by_input}
        for op in self.graph.ops:
            if all(t in found for t in op.inputs) and self.captured.calls[op.id].role is Role.CALL:
                found.update(dict.fromkeys(op.outputs, frozenset[int]().union(*(found[t] for t in op.inputs))))
        return found

    def _good(self) -> set[int]:
        """Forward ops that run on slices, and so does everything between them and the inputs."""
        good: set[int] = set()
        bad = set[int]()  # tensors
        for op in self.graph.ops[: self.boundary]:
            if self.cut_by_input.isdisjoint(op.inputs):
                continue
            if op.id in self.batch.answers and bad.isdisjoint(op.inputs):
                good.add(op.id)
            else:
                bad.update(op.outputs)
        return good

    def _is_heavy(self, op: int) -> bool:
        return getattr(self.captured.calls[op].target, "overloadpacket", None) in flop_registry

    # -- where to cut -----------------------------------------------------------------------------------------------

    def cuts(self) -> Iterator[int]:
        """Last ops of blocks: little crosses there, and what follows is narrower."""
        made = [max((self.size(t) for t in op.outputs if self.maker.get(t) == op.id), default=0) for op in self.graph.ops[: self.boundary]]
        inside = [size if op in self.good else 0 for op, size in enumerate(made)]
        before = list(accumulate(inside, max))
        samples = (
            op for op in range(self.boundary) if op not in self.good and not self.cut_by_input.isdisjoint(self.graph.ops[op].outputs)
        )
        others = max((made[op] for op in samples), default=0)
        after = [*accumulate(reversed(inside), max)][::-1]
        border, since = self._borders, 0
        passed_on = {self.root[t] for op in self.graph.ops[: self.boundary + 1] if not self.is_view(op) for t in op.inputs} | self.kept
        live = [op for op in sorted(self.good) if not passed_on.isdisjoint(self.graph.ops[op].outputs)]
        end = 0
        for number, op in enumerate(live):
            since = max(since, inside[op])
            follows = max(others, after[op + 1] if op + 1 < len(after) else 0)
            narrow = border[op] <= _NARROW * since and number >= end
            if narrow and follows <= _FALLS * before[op] and since >= _WIDE * max(inside):
                since, end = 0, self._narrowest(live, number) + 1
                yield live[end] - 1 if end < len(live) else self.boundary - 1  # with what is made for backward alone

    def _narrowest(self, live: list[int], number: int) -> int:
        """Where least crosses from this op on, before more does or the next product or convolution begins."""
        border, best = self._borders, number
        for k in range(number + 1, len(live)):
            if self._is_heavy(live[k]) or border[live[k]] > border[live[best]]:
                break
            if border[live[k]] < border[live[best]]:
                best = k
        return best

    @cached_property
    def _borders(self) -> list[int]:
        """After each forward op: bytes of values of good ops up to it that later ones read."""
        change = [0] * (self.boundary + 1)
        last: dict[int, int] = {}
        for op in self.graph.ops[: self.boundary + 1]:
            for t in op.inputs:
                value = self.root[t]
                last[value] = max(last.get(value, 0), op.id if op.id in self.good or self.is_view(op) else self.boundary)
        for value, maker in self.maker.items():
            if maker in self.good:
                change[maker] += self.size(value)
                change[self.boundary if value in self.kept else last.get(value, maker)] -= self.size(value)
        return list(accumulate(change))[: self.boundary]

    # -- what belongs to a block ------------------------------------------------------------------------------------

    def block(self, last: int, *, lean: bool) -> Block | None:
        """The good ops up to this one, with their backward."""
        forward = {op for op in self.good if op <= last}
        backward = self._backward(forward)
        inside = {op for op in forward | backward if not self.is_remade(op)}
        left = self.left(inside, set())
        wanted = {self.root[t] for op in left for t in self.graph.ops[op].inputs} | self.kept
        results, gradients = (tuple(v for v, op in self.maker.items() if op in own & inside and v in wanted) for own in (forward, backward))
        again = self._again(gradients, forward, backward, set() if lean else self._small(forward & inside))
        kept = tuple(v for v in again.inputs if self.maker.get(v) in forward)
        ahead = self.part((*results, *(v for v in kept if v not in results)), forward)
        left = self.left(inside, {*ahead.inputs, *again.inputs}.difference(kept))
        block = Block(forward=ahead, backward=again if gradients else None, left=left)
        return block if self._is_worth(block) else None

    def _small(self, forward: set[int]) -> set[int]:
        """Values inside that could be kept for backward: made of something much larger."""
        made = {v: self.graph.ops[op] for v, op in self.maker.items() if op in forward and self.batch.is_cut(v)}
        return {v for v, op in made.items() if self.size(v) <= _SMALL * max(map(self.size, op.inputs), default=0)}

    def _again(self, gradients: tuple[int, ...], forward: set[int], backward: set[int], small: set[int]) -> Part:
        """What makes these from small values, but for those that a light op makes of what is there anyway."""
        while True:
            part = self.part(gradients, forward | backward, given=small)
            there = {self.root[t] for t in (*part.inputs, *self.graph.sources, *(t for op in part.ops for t in self.graph.ops[op].outputs))}
            makers = {v: self.graph.ops[self.maker[v]] for v in part.inputs if v in small}
            cheap = {v for v, op in makers.items() if not self._is_heavy(op.id) and there.issuperset(self.root[t] for t in op.inputs)}
            if not cheap:
                return part
            small = small - cheap

    def _backward(self, forward: set[int]) -> set[int]:
        """Ops after the boundary that lead to readers of the block's values and to the gradients of what it reads."""
        known = {self.root[t] for op in forward for t in self.graph.ops[op].inputs}
        known |= {source for value in known for source in self.origins.get(value, ())}
        fits: set[int] = set()
        for op in self.graph.ops[self.boundary + 1 :]:
            if op.id in self.batch.answers and all(self._is_ours(self.root[t], forward, known, fits) for t in op.inputs):
                fits.add(op.id)
        made = {v for v, maker in self.maker.items() if maker in forward}
        pending = [reader for reader in fits if not made.isdisjoint(self.root[t] for t in self.graph.ops[reader].inputs)]
        pending += [maker for maker in self._gradient_makers(known) if maker in fits]
        found: set[int] = set()
        while pending:
            reader = pending.pop()
            if reader not in found:
                found.add(reader)
                pending.extend(m for m in self._makers(reader) if m in fits)
        return self._without_ways_back(found)

    def _makers(self, op: int) -> Iterator[int]:
        for t in self.graph.ops[op].inputs:
            yield from self.graph.producers[t][:1]

    def _without_ways_back(self, found: set[int]) -> set[int]:
        """Less those ops that others, which the block waits for, read: a gradient that goes around another part of the network."""
        while True:
            pending, waited_for = [m for op in found for m in self._makers(op) if m not in found], set[int]()
            while pending:
                op = pending.pop()
                if op > self.boundary and op not in waited_for:
                    waited_for.add(op)
                    pending.extend(m for m in self._makers(op) if m not in found)
            around = {op for op in found for t in self.graph.ops[op].outputs if not waited_for.isdisjoint(self.graph.readers[t])}
            if not around:
                return found
            found = found - around

    def _is_ours(self, value: int, forward: set[int], known: set[int], fits: set[int]) -> bool:
        """Whether a value that backward reads comes from this part of the network or is a gradient."""
        maker = self.maker.get(value)
        if value in known or value in self.gradients:
            return True
        if value in self.origins:  # made of weights and constants: whose?
            return self.origins[value] <= known
        return maker is not None and (maker in forward or maker in fits)

    def _gradient_makers(self, known: set[int]) -> Iterator[int]:
        """Ops that make gradients of the block's sources, or sums that these are made of."""
        sources = self.captured.convention.sources
        pending = [
            call.args[0].tensor for call in self.captured.calls if call.role is Role.ACCUMULATE and self.root[sources[call.index]] in known
        ]
        while pending:
            value = self.root[pending.pop()]
            maker = self.maker.get(value)
            if maker is None:
                continue
            yield maker
            pending.extend(t for t in self.graph.ops[maker].inputs if self.batch.states[self.root[t]] is SUMMED)

    def _is_worth(self, block: Block) -> bool:
        """Whether what crosses the border, both ways, is no more than the widest value inside."""
        widest = max(self.size(t) for op in block.forward.ops for t in self.graph.ops[op].outputs)
        crossing = [*block.forward.outputs]
        if block.backward is not None:
            split = (t for t in block.backward.outputs if isinstance(self.batch.states[t], Split))
            crossing += [*split, *(t for t in block.backward.inputs if t in self.gradients)]
        return bool(block.forward.outputs) and sum(map(self.size, crossing)) <= widest
