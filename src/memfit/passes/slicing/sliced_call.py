"""A part of a step that runs slice by slice of the batch, as one callable.

    x  ──narrow──> slice 0 ─┐                       ┌─> place 0 ┐
                   slice 1 ─┼─> compiled ops ─> ────┼─> place 1 ├─> y, whole
                   slice 2 ─┘        │              └─> place 2 ┘
                                     └─> added to the gradients of weights

Whole are what is given and what is wanted; of everything in between one slice exists at a time. A slice's results are written where
they belong by the code that makes them. All slices have one size, but for the last where the batch does not divide.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.kernels.compiler import PlainOps
from memfit.kernels.implementation import HALF, Implementation, Work
from memfit.passes.regions.compiler import Compiler
from memfit.passes.regions.piece import Piece
from memfit.passes.slicing.analysis import Batch
from memfit.passes.slicing.loss_rules import find_constant
from memfit.passes.slicing.parts import Part
from memfit.passes.slicing.states import UNIFORM, Rows, Split, State
from memfit.torch_private.fake import fake_mode
from memfit.torch_private.trees import map_leaves

aten, prims = torch.ops.aten, torch.ops.prims
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class Sliced(Implementation):
    """Called with whole tensors, gives whole tensors."""

    def __init__(self, batch: Batch, part: Part, slice_size: int, compiler: Compiler | None) -> None:
        self._cuts = tuple(batch.cuts(t) for t in (*part.inputs, *part.outputs))
        self._outputs = tuple((_layout(batch, t), batch.is_summed(t)) for t in part.outputs)
        self._num_samples = batch.num_samples
        whole, rest = divmod(batch.size, slice_size)
        counts = (*[slice_size] * whole, *[rest] * (rest > 0))
        known = {count: _piece(batch, part, count, compiler) for count in dict.fromkeys(counts)}
        self._parts = tuple((count, known[count]) for count in counts)
        self.pieces = tuple(known.values())
        text = repr(
            (self._num_samples, [(n, p.digest) for n, p in self._parts]) if batch.outer else [(n, p.digest) for n, p in self._parts]
        )
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._work = _count_work(batch, part, slice_size, self.num_slices, compiler)

    @property
    def name(self) -> str:
        return f"sliced_{self.digest}"

    @property
    def num_slices(self) -> int:
        return self._num_samples * len(self._parts)

    def work(self, made: Any, *inputs: torch.Tensor) -> Work:
        return self._work

    @property
    def is_compiled(self) -> bool:
        return all(piece.is_compiled for piece in self.pieces)

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        device = inputs[0].device
        outputs = [_new(layout, summed, device) for layout, summed in self._outputs]
        for sample in range(self._num_samples):
            whole = [_slice(x, cut, sample, 1) for x, (cut, _) in zip((*inputs, *outputs), self._cuts, strict=True)]
            start = 0
            for count, piece in self._parts:
                piece.compile()([_slice(x, cut, start, count) for x, (_, cut) in zip(whole, self._cuts, strict=True)])
                start += count
        return [made.to(layout[2]) for made, (layout, _) in zip(outputs, self._outputs, strict=True)]


def _slice(x: torch.Tensor, cut: Split | None, start: int, count: int) -> torch.Tensor:
    return x if cut is None else x.narrow(cut.dim, start * cut.rows, count * cut.rows)


def _layout(batch: Batch, tensor: int) -> Layout:
    sample = batch.captured.samples[tensor]
    assert sample is not None
    return tuple(sample.shape), sample.stride(), sample.dtype, sample.device


def _adding_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _new(layout: Layout, summed: bool, device: torch.device) -> torch.Tensor:
    """Where slices are written, or added to."""
    shape, strides, dtype, _ = layout
    if not summed:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=_adding_in(dtype), device=device).zero_()


# -- the code of one slice ---------------------------------------------------------------------------------------------


def _piece(batch: Batch, part: Part, count: int, compiler: Compiler | None) -> Piece:
    module, layouts = _Writer(batch, part, count, adds=compiler is None).module()
    with torch.no_grad(), fake_mode():
        _Shapes(module).run(*_empty(layouts))
    nodes = [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in module.graph.nodes]
    digest = hashlib.sha256(repr((nodes, [str(layout) for layout in layouts])).encode()).hexdigest()[:16]
    piece = Piece(digest, len(part.ops), compiler or PlainOps(), lambda: (module, _fake(layouts)))
    if compiler is None:
        piece.compile()
    return piece


class _Shapes(torch.fx.Interpreter):
    """Goes through a slice's ops without computing: one that does not take a slice says so, and no result is stretched to its place."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.copy_.default and (args[0].shape, args[0].dtype) != (args[1].shape, args[1].dtype):
            raise RuntimeError(f"a slice makes {tuple(args[1].shape)} where {tuple(args[0].shape)} belong")
        return super().call_function(target, args, kwargs)


def _empty(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    return [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype, device in layouts]


def _fake(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    with fake_mode():
        return _empty(layouts)


class _Writer:
    """The ops of a part on a slice of so many samples, as an fx graph: inputs, then places for outputs, all written in place.

    `adds`: sums are added to where they belong by ops that write there; a compiler takes only copies.
    """

    def __init__(self, batch: Batch, part: Part, count: int, *, adds: bool) -> None:
        self.batch, self.part, self.count, self.adds = batch, part, count, adds
        self.calls, self.states = batch.captured.calls, batch.states
        self.graph = torch.fx.Graph()
        self.node_of: dict[Any, torch.fx.Node] = {}

    def module(self) -> tuple[torch.fx.GraphModule, list[Layout]]:
        for position, t in enumerate(self.part.inputs):
            self.node_of[t] = self.graph.placeholder(f"x{position}")
        places = [self.graph.placeholder(f"y{position}") for position in range(len(self.part.outputs))]
        for op in self.part.ops:
            if UNIFORM not in self.batch.answers[op].makes:
                self._call(op, self.calls[op])
        for t, place in zip(self.part.outputs, places, strict=True):
            self._write(t, place)
        self.graph.output(())
        self.graph.eliminate_dead_code()
        layouts = [*(self._layout(t) for t in self.part.inputs), *(self._layout(t, place=True) for t in self.part.outputs)]
        return torch.fx.GraphModule(torch.nn.Module(), self.graph), layouts

    def _layout(self, tensor: int, *, place: bool = False) -> Layout:
        shape, strides, dtype, device = _layout(self.batch, tensor)
        shape = tuple(self._sizes(shape, *self.batch.cuts(tensor)))
        return shape, strides, _adding_in(dtype) if place and self.batch.is_summed(tensor) else dtype, device

    def _sizes(self, shape: Sequence[int], outer: State | None, inner: State | None) -> list[int]:
        """Of a slice's part."""
        sizes = list(shape)
        if isinstance(outer, Split):
            sizes[outer.dim] = outer.rows
        if isinstance(inner, Split):
            sizes[inner.dim] = self.count * inner.rows
        return sizes

    def _call(self, op: int, call: OpCall) -> None:
        answer = self.batch.answers[op]

        def given(value: Any) -> Any:
            if isinstance(value, Rows):
                return value.each * self.count
            if not isinstance(value, Ref):
                return value
            if self.states[value.tensor] is UNIFORM:
                return self._constant(value.tensor, op, answer.takes[value.tensor])
            return self.node_of[value.tensor]

        args, kwargs = map_leaves(given, (answer.args, dict(call.kwargs)))
        assert call.target is not None
        node = self.graph.call_function(call.target, args, kwargs)
        for position, made in enumerate(call.outputs):
            if made is not None:
                self.node_of[made] = self.graph.call_function(operator.getitem, (node, position)) if call.unpack else node

    def _constant(self, tensor: int, op: int, state: State) -> torch.fx.Node:
        """As an op takes it."""
        outer = self.batch.outer
        shape, _, dtype, device = _layout(self.batch, tensor)
        sizes = self._sizes(shape, None if outer is None else outer.answers[op].takes.get(tensor), state)
        key = (tensor, *sizes)
        if key not in self.node_of:
            number = find_constant(self.calls[self.batch.captured.graph.producers[tensor][0]])
            kind: dict[str, Any] = {"dtype": dtype, "device": device}
            self.node_of[key] = self.graph.call_function(aten.full.default, (sizes, number), kind)
        return self.node_of[key]

    def _write(self, tensor: int, place: torch.fx.Node) -> None:
        value, (_, _, dtype, _) = self.node_of[tensor], _layout(self.batch, tensor)
        if not self.batch.is_summed(tensor):
            self.graph.call_function(aten.copy_.default, (place, value))
        elif self.adds:
            self._add(tensor, place, value)
        else:
            if _adding_in(dtype) is not dtype:
                value = self.graph.call_function(prims.convert_element_type.default, (value, _adding_in(dtype)))
            value = self.graph.call_function(aten.add.Tensor, (place, value))
            self.graph.call_function(aten.copy_.default, (place, value))

    def _add(self, tensor: int, place: torch.fx.Node, value: torch.fx.Node) -> None:
        if _multiplies_in_place(self.batch, self.part, tensor) and not value.users:
            self.graph.call_function(aten.addmm_.default, (place, *value.args))
        else:
            self.graph.call_function(aten.add_.Tensor, (place, value))


def _multiplies_in_place(batch: Batch, part: Part, tensor: int) -> bool:
    """Whether a sum over slices is one of products in its own type, which a library adds up where they lie."""
    graph, dtype = batch.captured.graph, _layout(batch, tensor)[2]
    own = set(part.ops)
    alone = not any(r in own for r in graph.readers[tensor])
    return alone and batch.captured.calls[graph.producers[tensor][0]].target is aten.mm.default and _adding_in(dtype) is dtype


# -- for estimates -----------------------------------------------------------------------------------------------------


def _count_work(batch: Batch, part: Part, slice_size: int, num_slices: int, compiler: Compiler | None) -> Work:
    """Of the ops that run as kernels of their own, each as often as there are slices, beside what one slice holds at most. Values between
    ops that a compiler fuses do not exist."""
    graph, own = batch.captured.graph, set(part.ops)
    fused = {op for op in part.ops if compiler is not None and compiler.fuses(batch.captured.calls[op].target)}

    def is_written(op: int) -> bool:
        readers = {r for t in graph.ops[op].outputs for r in graph.readers[t] if r in own}
        return op not in fused or not readers or bool(readers - fused)

    written = [op for op in part.ops if is_written(op) and not all(graph.is_view(graph.ops[op], t) for t in graph.ops[op].outputs)]
    outside = {graph.storage_of(t) for t in (*part.inputs, *part.outputs)}
    made = {op: {graph.storage_of(t) for t in graph.ops[op].outputs} - outside for op in written}
    ends = {graph.storage_of(t): op for op in part.ops for t in graph.ops[op].inputs}
    held: set[int] = set()
    peak_bytes = 0
    for op in part.ops:
        held |= made.get(op, set())
        peak_bytes = max(peak_bytes, sum(graph.storages[s].size_bytes for s in held))
        held -= {s for s in held if ends.get(s, op) == op}
    slice_bytes = -(-peak_bytes * slice_size // (batch.size * batch.num_samples))
    summed_bytes = _count_summed(batch, part, compiler)
    every = (batch.captured.work(batch.captured.calls[op]) for op in written)
    return Work(
        launches=0, workspace_bytes=slice_bytes + summed_bytes, then=tuple(replace(w, launches=w.launches * num_slices) for w in every)
    )


def _count_summed(batch: Batch, part: Part, compiler: Compiler | None) -> int:
    """Beside results that are sums over slices: what one slice adds, unless it is added in place, and wider numbers to add up in."""
    wide_bytes, added_bytes = 0, 0
    for t in (t for t in part.outputs if batch.is_summed(t)):
        size, (_, _, dtype, _) = batch.captured.graph.size_of(t), _layout(batch, t)
        if _adding_in(dtype) is not dtype:
            wide_bytes += size * _adding_in(dtype).itemsize // dtype.itemsize
        if compiler is not None or not _multiplies_in_place(batch, part, t):
            added_bytes = max(added_bytes, size)
    return wide_bytes + added_bytes
