"""A captured step with its fusible ops gathered into compiled regions: a pass Captured -> Captured.

    fine:    conv ─ var_mean ─ sub ─ mul ─ ... ─ relu ─ conv        thousands of ops
    coarse:  conv ─ region ─ conv                                    hundreds: library calls, views, regions

Everything after (costs, planning, generated code, sessions) works on the coarse step as on any other. Beside each region the
planner is offered other ways to the same values, each with its own compiled code and its own measured cost:

- *again*: one output of a forward region from its other outputs (a normalisation from its input and saved statistics),
- *deeper*: a backward region that makes a forward activation again inside its kernels instead of reading it,
- *apart*: the outputs of a region with the largest working sets one by one, which reads more and holds less,
- *in place*: outputs of a forward region with a large working set over inputs of the same layout that nobody reads any more
  (backward regions took a buffer as large as what they overwrote, measured on the H200).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.graph import Op, Variant
from memfit.passes.assemble import Item, assemble, item_of
from memfit.passes.interface import Context, Level, Numbers, Pass
from memfit.passes.regions.compiler import Compiler
from memfit.passes.regions.groups import Fusion, Group
from memfit.passes.regions.piece import Region, Slice, digest_of

_HEAVY = 0.6  # of the largest working set of a region: from there on its outputs are offered one by one
_LARGE = 0.3  # from there on over its inputs


def gather_regions(captured: Captured, compiler: Compiler, *, choices: bool = True, least_fraction: float = 1 / 1000) -> Captured:
    """The same step in regions. Without `choices` each region comes in one form only: less to compile."""
    return _Regions(captured, compiler, least_fraction).gather(choices)


class _Regions:
    def __init__(self, captured: Captured, compiler: Compiler, least_fraction: float) -> None:
        self.captured, self.graph, self.compiler = captured, captured.graph, compiler
        self.fusion = Fusion(captured, compiler.fuses)
        crossing = sum(self.fusion.size(v) for v, op in self.fusion.maker.items() if not self.fusion.fused[op] or v in self.fusion.crossing)
        self.least_bytes = max(1, int(crossing * least_fraction))
        self.known: dict[str, Region] = {}

    def gather(self, choices: bool) -> Captured:
        items = [*self._others()]
        parts = [(group, self.fusion.slice(group.outputs, own=group.ops)) for group in self.fusion.groups]
        largest = max((self._working_set(part) for _, part in parts), default=0)
        for group, part in parts:
            item = self._item(part, "region", max(group.ops.intersection(part.ops)))
            items.append(item)
            if not choices:
                continue
            if group.is_backward:
                self._add_deeper(item, group, part)
            else:
                items.extend(self._again(group, part))
            if self._working_set(part) >= _HEAVY * largest:
                items.extend(self._apart(group, part))
            if self._working_set(part) >= _LARGE * largest and not group.is_backward:
                self._add_in_place(item, part)
        return assemble(self.captured, items)

    def _working_set(self, part: Slice) -> int:
        return sum(self.fusion.size(v) for v in (*part.inputs, *part.outputs))

    def _others(self) -> Iterator[Item]:
        """Library calls and bookkeeping as they are, and the views that they or the caller see."""
        wanted = set(self.graph.results)
        for op in reversed(self.graph.ops):
            view = self.fusion.is_view(op)
            if self.fusion.fused[op.id] or (view and not wanted.intersection(op.outputs)):
                continue
            wanted.update(t for form in op.forms for t in form.inputs)
            yield item_of(self.captured, op.id)

    # -- forms of a region ------------------------------------------------------------------------------------------

    def _item(self, part: Slice, what: str, place: int, *, optional: bool = False) -> Item:
        call = self._call(part)
        name = f"{what} {call.target.digest}"  # type: ignore[union-attr]
        where = self.graph.ops[place].where
        return Item(Op(id=-1, name=name, inputs=part.inputs, outputs=part.outputs, where=where), [], call, place, optional)

    def _call(self, part: Slice) -> OpCall:
        digest = digest_of(self.captured, part)
        if digest not in self.known:
            self.known[digest] = Region(self.captured, part, digest, self.compiler)
        return OpCall(target=self.known[digest], args=tuple(map(Ref, part.inputs)), outputs=part.outputs, unpack=True)

    def _again(self, group: Group, whole: Slice) -> Iterator[Item]:
        """Each large output from what else the region gives: from all of it, and from the small values (statistics) alone."""
        offered = {(whole.inputs, whole.outputs)}
        for value in group.outputs:
            if self.fusion.size(value) < self.least_bytes:
                continue
            siblings = frozenset(group.outputs) - {value}
            small = frozenset(v for v in siblings if self.fusion.size(v) < self.least_bytes)
            for given in (siblings, small):
                part = self.fusion.slice((value,), own=group.ops, given=given)
                if (part.inputs, part.outputs) not in offered and len(part.ops) < len(whole.ops):
                    offered.add((part.inputs, part.outputs))
                    yield self._item(part, "again", max(group.ops.intersection(whole.ops)), optional=True)

    def _apart(self, group: Group, whole: Slice) -> Iterator[Item]:
        """Every large output alone, and the small ones together; a large one may start from the small ones."""
        large = [v for v in group.outputs if self.fusion.size(v) >= self.least_bytes]
        small = tuple(v for v in group.outputs if v not in large)
        if len(large) + bool(small) < 2:
            return
        for outputs, given in ((small, frozenset[int]()), *(((v,), frozenset(small)) for v in large)):
            if outputs:
                part = self.fusion.slice(outputs, own=group.ops, given=given)
                yield self._item(part, "apart", max(group.ops.intersection(whole.ops)), optional=True)

    def _add_in_place(self, item: Item, part: Slice) -> None:
        """Each large output over an input like it that is not the caller's."""
        free = [v for v in part.inputs if v in self.fusion.maker and v not in self.fusion.kept]
        over: dict[int, int] = {}
        for value in part.outputs:
            like = (v for v in free if self._layout(v) == self._layout(value))
            if self.fusion.size(value) >= self.least_bytes and (given := next(like, None)) is not None:
                over[value] = given
                free.remove(given)
        if over:
            call = self._call(replace(part, over=tuple(over.items())))
            name = f"in place {call.target.digest}"  # type: ignore[union-attr]
            item.forms.append((Variant(name=name, inputs=part.inputs, outputs=part.outputs, inplace_of=tuple(over.items())), call))

    def _layout(self, value: int) -> tuple[Any, ...]:
        sample = self.captured.samples[value]
        assert sample is not None
        return sample.dtype, tuple(sample.shape), sample.stride(), self.fusion.size(value)

    def _add_deeper(self, item: Item, group: Group, whole: Slice) -> None:
        """Forward activations made again inside, where that reads no more bytes than it saves."""
        candidates = [v for v in whole.inputs if self._can_open(v)]
        opened = frozenset(v for v in candidates if self._saves(whole, self._opened(group, frozenset([v])), v))
        if not opened:
            return
        part = self._opened(group, opened)
        call = self._call(part)
        name = f"deeper {call.target.digest}"  # type: ignore[union-attr]
        item.forms.append((Variant(name=name, inputs=part.inputs, outputs=part.outputs), call))

    def _can_open(self, value: int) -> bool:
        op = self.fusion.maker.get(value)
        large = self.fusion.size(value) >= self.least_bytes
        return op is not None and large and self.fusion.fused[op] and not self.fusion.backward[op] and self.fusion.is_elementwise(op)

    def _opened(self, group: Group, opened: frozenset[int]) -> Slice:
        """Through the opened values to what their own groups read, and to statistics."""
        return self.fusion.slice(group.outputs, own=group.ops, opened=opened)

    def _saves(self, whole: Slice, part: Slice, value: int) -> bool:
        new = sum(self.fusion.size(v) for v in part.inputs if v not in whole.inputs)
        elementwise = all(
            self.fusion.is_elementwise(op) for op in part.ops if op not in whole.ops and not self.fusion.is_view(self.graph.ops[op])
        )
        return value not in part.inputs and new <= self.fusion.size(value) and elementwise


def regions_of(captured: Captured) -> tuple[Region, ...]:
    """The distinct regions of a step, to compile or count."""
    found = {}
    for calls in (captured.calls, *captured.variant_calls):
        found.update({c.target.digest: c.target for c in calls if c.role is Role.CALL and isinstance(c.target, Region)})
    return tuple(found.values())


def _run(captured: Captured, context: Context) -> Iterable[Captured]:
    assert context.compiler is not None
    return (gather_regions(captured, context.compiler, choices=context.variants),)


REGIONS = Pass(
    name="regions",
    where="ops that a compiler fuses",
    becomes="compiled regions, each in several forms",
    saves="values inside them, launches",
    level=Level.STEP,
    numbers=Numbers.ROUNDS,
    run=_run,
)
