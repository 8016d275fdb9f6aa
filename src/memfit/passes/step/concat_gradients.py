"""Gradients of a concatenation part by part: a pass Captured -> Captured.

    skip ─┐                                   d skip <─ slice ─┐
          cat ─> c ─> convolution ─> y                         d c <─ convolution' <─ d y, c        as traced
    up ───┘                                   d up   <─ slice ─┘

                                              d skip <─ convolution' of its channels <─ d y
                                              d up   <─ convolution' of its channels <─ d y         by parts
                                              d weight <─ d y, c      or      <─ d y, skip, up

A convolution's gradient for some channels of its input takes that part of the weight alone, so the gradient of the whole
concatenation need not exist: each part has its own bytes, and the one for a skip connection, which waits until backward comes to
where the skip began, no longer holds the others. The kernels are the same over fewer channels, and copies go that PyTorch makes
of slices that are not dense. The gradient of the weight reads the concatenation or, as a variant, its parts: what is there is
read, and the concatenation is not made again for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.capture.lower.storages import allocated_bytes, granularity_of
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.kernels.concat_gradients import GradientOfPart, ParameterGradientsFromParts
from memfit.kernels.layouts import make_like, order_strides
from memfit.passes.assemble import Item, assemble, item_of
from memfit.passes.interface import Context, Level, Numbers, Pass
from memfit.passes.regions.compiler import Compiler
from memfit.passes.regions.groups import Fusion
from memfit.torch_private.fake import fake_mode
from memfit.torch_private.trees import map_leaves

aten = torch.ops.aten
Samples = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Channels [start, stop) of a concatenation whose gradient `slice` cuts out as tensor `gradient`."""

    start: int
    stop: int
    slice: int
    gradient: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Concatenation:
    """One that a convolution reads: the convolution's backward, the tensors put together, and the parts that have gradients."""

    backward: int
    whole: Ref
    inputs: tuple[Ref, ...]
    parts: tuple[Part, ...]


def split_concat_gradients(
    captured: Captured, compiler: Compiler | None = None, *, least_fraction: float = 1 / 20, least_channels: int = 16
) -> Captured | None:
    """The same step without the gradients of large concatenations, or None where there is none. A part of fewer channels than
    `least_channels` would not fill a kernel; large is meant against the largest storage."""
    largest = max((s.size_bytes for s in captured.graph.storages), default=0)
    found, samples = [], Samples()
    for op in captured.graph.ops:
        candidate = _concatenation(captured, op)
        if candidate is None or captured.graph.size_of(op.outputs[0]) < least_fraction * largest:
            continue
        dense = _dense_gradients(captured, candidate, samples) if _pays(captured, candidate, least_channels) else None
        if dense is not None:
            found.append(candidate)
            samples = dense
    return _Writer(captured, compiler, samples).written(found) if found else None


# -- where ---------------------------------------------------------------------------------------------------------------


def _concatenation(captured: Captured, op: Op) -> Concatenation | None:
    """Behind a convolution's backward whose gradient for its input is cut into the parts of a concatenation, and nothing else."""
    graph, call = captured.graph, captured.calls[op.id]
    if call.target is not aten.convolution_backward.default or op.variants or call.outputs[0] is None:
        return None
    _, whole, weight, _, _, _, _, transposed, _, groups, _ = call.args
    makers = graph.producers[whole.tensor]
    cat = captured.calls[makers[0]] if makers else None
    if cat is None or cat.target is not aten.cat.default or transposed or groups != 1 or not isinstance(weight, Ref):
        return None
    dim = cat.args[1] if len(cat.args) > 1 else 0
    inputs = tuple(cat.args[0])
    shapes = [_sample(captured, ref.tensor).shape for ref in inputs]
    if dim % len(_sample(captured, whole.tensor).shape) != 1 or any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    starts = [sum(shape[1] for shape in shapes[:k]) for k in range(len(shapes))]
    bounds = {(start, start + shape[1]) for start, shape in zip(starts, shapes, strict=True)}
    parts = tuple(_parts(captured, call.outputs[0]))
    ranges = [(part.start, part.stop) for part in parts]
    if not parts or len(set(ranges)) < len(ranges) or not bounds.issuperset(ranges) or _is_read(captured, call.outputs[0], parts):
        return None
    return Concatenation(backward=op.id, whole=whole, inputs=inputs, parts=parts)


def _parts(captured: Captured, gradient: int) -> Iterator[Part]:
    channels = _sample(captured, gradient).shape[1]
    for reader in captured.graph.readers[gradient]:
        call = captured.calls[reader]
        if call.target is aten.slice.Tensor and len(call.args) in (3, 4) and call.args[1] in (1, 1 - _sample(captured, gradient).dim()):
            (made,) = captured.graph.ops[reader].outputs
            start = min(call.args[2] or 0, channels) % max(channels, 1)
            yield Part(start=start, stop=start + _sample(captured, made).shape[1], slice=reader, gradient=made)


def _is_read(captured: Captured, gradient: int, parts: tuple[Part, ...]) -> bool:
    """Whether something besides the parts reads the whole gradient."""
    graph = captured.graph
    outputs = {o.tensor for o in captured.convention.outputs if isinstance(o, Ref)}
    kept = {graph.storage_of(t) for t in (*graph.results, *outputs, *(t for _, t in captured.convention.mutations))}
    return graph.storage_of(gradient) in kept or set(graph.readers[gradient]) != {part.slice for part in parts}


def _pays(captured: Captured, found: Concatenation, least_channels: int) -> bool:
    """Each part reads the incoming gradient once more: that must not be more than what is no longer written and read whole."""
    call, graph = captured.calls[found.backward], captured.graph
    read_again = (len(found.parts) - 1) * graph.size_of(call.args[0].tensor)
    assert call.outputs[0] is not None
    return read_again <= graph.size_of(call.outputs[0]) and all(part.stop - part.start >= least_channels for part in found.parts)


def _sample(captured: Captured, tensor: int) -> torch.Tensor:
    found = captured.samples[tensor]
    assert found is not None
    return found


# -- what their readers see ------------------------------------------------------------------------------------------------


def _dense_gradients(captured: Captured, found: Concatenation, known: Mapping[int, torch.Tensor]) -> Samples | None:
    """`known`, and samples of the parts' gradients and views of them when each part lies alone; None when that would change the
    layout of anything made from them."""
    graph, samples = captured.graph, dict(known)
    with fake_mode():
        for part in found.parts:
            old = _sample(captured, part.gradient)
            samples[part.gradient] = make_like(old, strides=order_strides(old.shape, old.stride()))
    changed = {part.gradient for part in found.parts}
    for op in graph.ops[found.backward + 1 :]:
        if not changed.intersection(op.inputs) or any(op.id == part.slice for part in found.parts):
            continue
        made = _made(captured, op, samples)
        if made is None:
            return None
        for tensor, sample in made.items():
            old = _sample(captured, tensor)
            if graph.is_view(op, tensor):
                samples[tensor] = sample
                changed.add(tensor)
            elif (old.shape, old.stride(), old.dtype) != (sample.shape, sample.stride(), sample.dtype):
                return None
    return samples


def _made(captured: Captured, op: Op, samples: Samples) -> Samples | None:
    """What an op makes of these samples; None where that cannot be said, or says where in memory it reads."""
    call = captured.calls[op.id]
    if call.role is not Role.CALL or call.target is None or call.target in (aten.as_strided.default, aten.as_strided_copy.default):
        return None
    with fake_mode(), torch.no_grad():

        def fake(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            like = samples.get(value.tensor)
            like = _sample(captured, value.tensor) if like is None else like
            return make_like(like)

        args, kwargs = map_leaves(fake, (call.args, dict(call.kwargs)))
        try:
            result = call.target(*args, **kwargs)
        except RuntimeError:
            return None
    every = result if call.unpack else (result,)
    return {t: sample for t, sample in zip(call.outputs, every, strict=False) if t is not None}


# -- the new step ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Puts the step together again. `samples` are those of tensors that lie elsewhere from now on."""

    def __init__(self, captured: Captured, compiler: Compiler | None, samples: Samples) -> None:
        self.captured, self.graph = captured, captured.graph
        self.fusion = None if compiler is None else Fusion(captured, compiler.fuses)
        self.granularity = granularity_of(captured.device)
        self.samples = {**dict(enumerate(captured.samples)), **samples}
        self.tensors, self.storages = list(self.graph.tensors), list(self.graph.storages)
        self.again: dict[int, Item] = {}  # parts made once more, by part

    def written(self, found: list[Concatenation]) -> Captured:
        items: list[Item] = []
        by_backward = {c.backward: c for c in found}
        slices = {part.slice for c in found for part in c.parts}
        for op in self.graph.ops:
            if op.id in by_backward:
                items.extend(self._gradients(by_backward[op.id]))
            elif op.id not in slices:
                items.append(item_of(self.captured, op.id))
        items.extend(self.again.values())
        moved = Graph(
            ops=self.graph.ops,
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            sources=self.graph.sources,
            results=self.graph.results,
        )
        samples = tuple(self.samples[t] for t in range(len(self.tensors)))
        return assemble(replace(self.captured, graph=moved, samples=samples), items)

    def _gradients(self, found: Concatenation) -> Iterator[Item]:
        """Of the parameters, if they have any, and of each part."""
        call, op = self.captured.calls[found.backward], self.graph.ops[found.backward]
        gradient, _, weight, bias_sizes, *geometry, mask = call.args
        stride, padding, dilation = geometry[:3]  # it is not transposed, and has one group
        if any(mask[1:]):
            outputs = (None, *call.outputs[1:])
            args = (gradient, found.whole, weight, bias_sizes, *geometry, [False, *mask[1:]])
            parameters = replace(call, args=args, outputs=outputs)
            node = replace(op, id=-1, outputs=tuple(t for t in outputs if t is not None))
            yield Item(node, self._from_parts(found, node, parameters), parameters, op.id)
        for part in found.parts:
            self._move(part)
            sample = self.samples[part.gradient]
            assert sample is not None
            target = GradientOfPart(
                start=part.start,
                stop=part.stop,
                shape=tuple(sample.shape),
                strides=sample.stride(),
                stride=tuple(stride),
                padding=tuple(padding),
                dilation=tuple(dilation),
            )
            made = OpCall(target=target, args=(gradient, weight), outputs=(part.gradient,))
            inputs = (gradient.tensor, weight.tensor)
            node = Op(id=-1, name="memfit.gradient_of_part", inputs=inputs, outputs=(part.gradient,), where=op.where)
            yield Item(node, [], made, op.id)

    def _from_parts(self, found: Concatenation, op: Op, call: OpCall) -> list[tuple[Variant, OpCall]]:
        """The gradients of weight and bias from the parts, where each exists or is one cheap op away."""
        parts = [self._part(ref.tensor) for ref in found.inputs]
        if any(part is None for part in parts):
            return []
        gradient, _, weight, *rest = call.args
        args = (gradient, tuple(Ref(part) for part in parts if part is not None), weight, *rest)
        inputs = tuple(dict.fromkeys((gradient.tensor, *(part for part in parts if part is not None), weight.tensor)))
        strides = tuple(None if t is None else self.samples[t].stride() for t in call.outputs)  # type: ignore[union-attr]
        made = replace(call, target=ParameterGradientsFromParts(strides[1]), args=args)
        return [(Variant(name="from parts", inputs=inputs, outputs=op.outputs), made)]

    def _part(self, tensor: int) -> int | None:
        """A tensor with a part's values that a library call can read: the part, if it exists outside kernels, else made again beside."""
        if self._exists(tensor):
            return tensor
        if tensor not in self.again:
            maker = self.fusion.maker.get(tensor) if self.fusion is not None else None
            if maker is None or len(self.graph.ops[maker].outputs) != 1 or not all(map(self._exists, self.fusion.reads[maker])):  # type: ignore[union-attr]
                return None
            sample, size = self.samples[tensor], self.graph.size_of(tensor)
            assert sample is not None
            new = self._new_tensor(size, sample, self.graph.tensors[tensor].name)
            op, call = self.graph.ops[maker], self.captured.calls[maker]
            self.again[tensor] = Item(replace(op, id=-1, outputs=(new,)), [], replace(call, outputs=(new,)), op.id)
        return self.again[tensor].op.outputs[0]

    def _exists(self, tensor: int) -> bool:
        makers = self.graph.producers[tensor]
        if makers and self.graph.is_view(self.graph.ops[makers[0]], tensor):
            return False
        return self.fusion is None or not makers or not self.fusion.fused[makers[0]] or tensor in self.fusion.crossing

    def _move(self, part: Part) -> None:
        """A storage of its own for a part's gradient and the views of it."""
        sample = self.samples[part.gradient]
        assert sample is not None
        new = self._new_storage(allocated_bytes(sample, self.granularity), "gradient of a part")
        moved = {part.gradient}
        for op in self.graph.ops[part.slice + 1 :]:
            if moved.intersection(op.inputs):
                moved |= {t for t in op.outputs if self.graph.is_view(op, t)}
        for t in moved:
            self.tensors[t] = replace(self.tensors[t], storage=new)

    def _new_storage(self, size_bytes: int, name: str) -> int:
        self.storages.append(Storage(id=len(self.storages), size_bytes=size_bytes, kind=Kind.ACTIVATION, name=name))
        return len(self.storages) - 1

    def _new_tensor(self, size_bytes: int, sample: torch.Tensor, name: str) -> int:
        storage = self._new_storage(size_bytes, name)
        self.tensors.append(Tensor(id=len(self.tensors), storage=storage, name=name))
        self.samples[len(self.tensors) - 1] = sample
        return len(self.tensors) - 1


def _run(captured: Captured, context: Context) -> Iterable[Captured]:
    found = split_concat_gradients(captured, context.compiler)
    return () if found is None else (found,)


CONCAT_GRADIENTS = Pass(
    name="concat-gradients",
    where="gradient of a concatenation",
    becomes="by parts, as each part is read",
    saves="the gradient of the whole",
    level=Level.STEP,
    numbers=Numbers.ROUNDS,
    run=_run,
)
