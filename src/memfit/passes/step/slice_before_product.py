"""Rows that a slice takes away after a product are taken away before it: part of how `losses_in_rows` finds rows.

    hidden ─> product ─> (batch, length) ─> slice ─> copy         hidden ─> (batch, length) ─> slice ─> copy ─> product
    d hidden, d W <─ products <─ zeros around <─ d scores         d hidden <─ zeros around <─ product <─ d scores ─> d W

So logits are shifted that are shifted against their labels, `logits[:, :-1].contiguous()`: their rows are no longer those of the product.
Nothing is computed that nobody reads, and the rows are the product's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.capture.lower.storages import viewed_argument
from memfit.core.graph import Op
from memfit.passes.slicing.loss_rules import find_constant
from memfit.passes.step.edit import Edit

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}  # and which argument has the rows
_TURNS = (aten.t.default, aten.permute.default, aten.transpose.int)
_WHOLE_SLICE: tuple[Any, ...] = (0, None, None, 1)
_SPREADS: dict[Any, int] = {aten.slice_backward.default: 0, aten.slice_scatter.default: 1}  # and which argument they put zeros around


def slice_before_products(captured: Captured, choose: Callable[[Captured], Iterable[int]]) -> Captured:
    """The same step where the rows of none of these products are sliced afterwards, as far as that can be seen."""
    while True:
        found = next(filter(None, (_find(captured, captured.graph.ops[op]) for op in choose(captured))), None)
        if found is None:
            return captured
        captured = _move(captured, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sliced:
    """A product whose rows are sliced. `shape`: of the scores before, `taken` after; `bounds`: the slice's other arguments."""

    product: Op
    rows: int  # tensor
    sliced: Op
    shape: tuple[int, ...]
    taken: tuple[int, ...]
    bounds: tuple[int, int, int]  # dimension, places taken away before and after
    gradient: int | None  # tensor: of what the slice gave
    readers: tuple[Op, ...]  # of the gradient of the scores


def _find(captured: Captured, product: Op) -> _Sliced | None:
    rows = rows_of(captured.calls[product.id])
    if rows is None:
        return None
    readers = _readers(captured, product.outputs[0])
    wide = product.outputs[0]
    if len(readers) == 1 and captured.calls[readers[0].id].target in VIEWS:
        wide = readers[0].outputs[0]
        readers = _readers(captured, wide)
    if len(readers) != 1 or captured.calls[readers[0].id].target is not aten.slice.Tensor:
        return None
    sliced = readers[0]
    shape, taken = _shape(captured, wide), _shape(captured, sliced.outputs[0])
    bounds = _bounds(captured.calls[sliced.id].args[1:], shape, taken)
    if bounds is None or shape[-1] != _shape(captured, product.outputs[0])[-1] or not _can_lie_densely(captured, sliced):
        return None
    found = _gradient(captured, rows, shape, taken, bounds)
    if found is None:
        return None
    gradient, ends = found
    return _Sliced(product=product, rows=rows, sliced=sliced, shape=shape, taken=taken, bounds=bounds, gradient=gradient, readers=ends)


def rows_of(call: OpCall) -> int | None:
    """The tensor whose rows a product multiplies."""
    position = _PRODUCTS.get(call.target) if call.role is Role.CALL else None
    value = None if position is None else call.args[position]
    return value.tensor if isinstance(value, Ref) else None


def _bounds(how: tuple[Any, ...], shape: tuple[int, ...], taken: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Of a slice (dimension, start, end, step) in steps of one that is not over classes."""
    dim, start, end, step = [*how, *_WHOLE_SLICE[len(how) :]]
    dim = dim % len(shape)
    first, last, _ = slice(start, end).indices(shape[dim])
    if step != 1 or dim == len(shape) - 1 or last - first != taken[dim]:
        return None
    return dim, first, shape[dim] - last


def _can_lie_densely(captured: Captured, sliced: Op) -> bool:
    """Whether nobody sees how the rows lie that a slice takes: it copies them, or computes with them."""
    sample, targets = captured.samples[sliced.outputs[0]], [captured.calls[op.id].target for op in _readers(captured, sliced.outputs[0])]
    lies = sample is not None and sample.is_contiguous()
    return lies or not any(target is None or viewed_argument(target, 0) is not None for target in targets)


def _is_copy(call: OpCall) -> bool:
    return call.target is aten.clone.default and call.kwargs.get("memory_format") is torch.contiguous_format


def _gradient(
    captured: Captured, rows: int, shape: tuple[int, ...], taken: tuple[int, ...], bounds: tuple[int, int, int]
) -> tuple[int | None, tuple[Op, ...]] | None:
    """Where backward puts zeros around a gradient that then makes those of this product; without a backward nothing."""
    found = None
    for op in captured.graph.ops[captured.boundary :]:
        call = captured.calls[op.id]
        if call.target not in _SPREADS or _shape(captured, op.outputs[0]) != shape:
            continue
        ends = _ends(captured, op, rows)
        if ends is None:
            continue
        given = call.args[_SPREADS[call.target]].tensor
        same = _bounds(call.args[2:], shape, taken) == bounds and _shape(captured, given) == taken
        onto_zeros = call.target is aten.slice_backward.default or _is_zero(captured, call.args[0].tensor)
        if not same or not onto_zeros or found is not None:
            return None
        found = given, ends
    return found or (None, ())


def _is_zero(captured: Captured, tensor: int) -> bool:
    makers = captured.graph.producers[tensor]
    return bool(makers) and find_constant(captured.calls[makers[0]]) == 0


def _ends(captured: Captured, spread: Op, rows: int) -> tuple[Op, ...] | None:
    """The products and the sum over rows that read the gradient of the scores, one of them with the product's rows; None for anything else."""
    pending, found, own = list(_readers(captured, spread.outputs[0])), list[Op](), False
    while pending:
        op = pending.pop()
        call = captured.calls[op.id]
        if call.target in (*VIEWS, *_TURNS):
            pending += _readers(captured, op.outputs[0])
            continue
        turned = captured.calls[captured.graph.producers[op.inputs[0]][0]].target in _TURNS
        by_rows = call.target is aten.mm.default and turned and call.args[1] == Ref(rows)
        by_weight = call.target is aten.mm.default and not turned
        summed = call.target is aten.sum.dim_IntList and not turned and call.args[1:] == ([0], True)
        if not by_rows and not by_weight and not summed:
            return None
        own = own or by_rows
        found.append(op)
    return tuple(found) if own else None


def _readers(captured: Captured, tensor: int) -> list[Op]:
    """But for views that nobody reads."""
    graph = captured.graph
    every = [graph.ops[r] for r in graph.readers[tensor]]
    dead = (op for op in every if captured.calls[op.id].target in (*VIEWS, *_TURNS) and not _readers(captured, op.outputs[0]))
    gone = {op.id for op in dead if not {*op.outputs} & {*graph.results}}
    return [op for op in every if op.id not in gone]


def _shape(captured: Captured, tensor: int) -> tuple[int, ...]:
    sample = captured.samples[tensor]
    return () if sample is None else tuple(sample.shape)


# -- putting ops in ----------------------------------------------------------------------------------------------------


def _move(captured: Captured, found: _Sliced) -> Captured:
    edit, call, place = Edit(captured), captured.calls[found.product.id], found.product
    (dim, before, after), width, end = found.bounds, _shape(captured, found.rows)[-1], found.sliced.outputs[0]
    whole = edit.add(place, aten.view.default, Ref(found.rows), [*found.shape[:-1], width])
    taken = edit.add(place, aten.slice.Tensor, Ref(whole), dim, before, found.shape[dim] - after)
    copied = edit.add(place, aten.clone.default, Ref(taken), memory_format=torch.contiguous_format)
    rows = edit.add(place, aten.view.default, Ref(copied), [prod(found.taken[:-1]), width])
    made = edit.add(place, call.target, *(Ref(rows) if value == Ref(found.rows) else value for value in call.args), **dict(call.kwargs))
    edit.move(end, made)
    edit.add(place, aten.view.default, Ref(made), list(found.taken), makes=end)
    edit.gone |= {found.product.id, found.sliced.id}
    for op in _readers(captured, end):
        if _is_copy(captured.calls[op.id]):  # rows lie as a copy would already
            edit.move(op.outputs[0], made)
            edit.add(op, aten.view.default, Ref(end), list(found.taken), makes=op.outputs[0])
            edit.gone.add(op.id)
    if found.gradient is not None:
        _move_backward(edit, found, rows)
    return edit.finish()


def _move_backward(edit: Edit, found: _Sliced, rows: int) -> None:
    """`change`: the gradient of what is left of the scores, as rows."""
    captured, (dim, before, after), dense = edit.captured, found.bounds, found.gradient
    place, sample = found.readers[0], edit.samples[found.gradient or 0]
    if sample is not None and not sample.is_contiguous():
        dense = edit.add(place, aten.clone.default, Ref(dense), memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    change = edit.add(place, aten.view.default, Ref(dense), [prod(found.taken[:-1]), found.shape[-1]])  # type: ignore[arg-type]
    for op in found.readers:
        call, made = captured.calls[op.id], op.outputs[0]
        edit.gone.add(op.id)
        if call.target is not aten.mm.default:
            edit.add(op, call.target, Ref(change), *call.args[1:], makes=made)
        elif call.args[1] == Ref(found.rows):
            turned = edit.add(op, aten.permute.default, Ref(change), [1, 0])
            edit.add(op, aten.mm.default, Ref(turned), Ref(rows), makes=made)
        else:
            width = _shape(captured, made)[-1]
            part = edit.add(op, aten.mm.default, Ref(change), call.args[1])
            placed = edit.add(op, aten.view.default, Ref(part), [*found.taken[:-1], width])
            around = [0, 0] * (len(found.shape) - 1 - dim) + [before, after]
            spread = edit.add(op, aten.constant_pad_nd.default, Ref(placed), around, 0.0, lies_with=made)
            edit.add(op, aten.view.default, Ref(spread), list(_shape(captured, made)), makes=made)
