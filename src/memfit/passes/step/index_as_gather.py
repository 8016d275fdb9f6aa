"""One place of each row, written as an index by rows, becomes a gather: part of how `losses_in_rows` proves that rows are rows.

    log_p[arange(rows), labels]              gather(log_p, 1, labels)                  forward
    index_put(zeros, [arange(rows), ..])     scatter_add(zeros, 1, labels, ..)         backward

An index by rows names all rows, in order, by their numbers, which a slice of them would count anew; a gather does not name them. Labels
below zero count from the end in one and not in the other, so they are counted first.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.core.graph import Op
from memfit.passes.slicing.loss_rules import find_constant
from memfit.passes.step.edit import Edit

aten, prims = torch.ops.aten, torch.ops.prims


def index_as_gather(captured: Captured) -> Captured:
    """The same step with every index by all rows as a gather."""
    edit = Edit(captured)
    for op in captured.graph.ops:
        call = captured.calls[op.id]
        if call.target is aten.index.Tensor and _is_by_rows(captured, call):
            found = edit.add(op, aten.gather.default, call.args[0], 1, Ref(_columns(edit, op, call)))
            edit.move(op.outputs[0], found)
            edit.add(op, aten.squeeze.dim, Ref(found), 1, makes=op.outputs[0])
        elif call.target is aten.index_put.default and _is_by_rows(captured, call) and _has_a_value_a_row(captured, call):
            columns = _columns(edit, op, call)
            values = _column_of_values(edit, op, call.args[2])
            scatter = aten.scatter_add.default if call.args[3:] == (True,) else aten.scatter.src  # rows differ: no place is written twice
            edit.add(op, scatter, call.args[0], 1, Ref(columns), Ref(values), makes=op.outputs[0])
        else:
            continue
        edit.gone.add(op.id)
    return edit.finish() if edit.gone else captured


def _columns(edit: Edit, op: Op, call: OpCall) -> int:
    """(rows, 1): the place in each row, counted from its beginning."""
    places = call.args[1][1]
    source = edit.captured.samples[call.args[0].tensor]
    assert source is not None
    below = edit.add(op, aten.lt.Scalar, places, 0)
    wrapped = edit.add(op, aten.add.Scalar, places, source.shape[1])
    counted = edit.add(op, aten.where.self, Ref(below), Ref(wrapped), places)
    return edit.add(op, aten.unsqueeze.default, Ref(counted), 1)


def _column_of_values(edit: Edit, op: Op, values: Ref) -> int:
    """(rows, 1); of a constant another constant."""
    makers = edit.captured.graph.producers[values.tensor]
    number = find_constant(edit.captured.calls[makers[0]]) if makers else None
    column = edit.add(op, aten.unsqueeze.default, values, 1)
    return column if number is None else edit.add(op, aten.full_like.default, Ref(column), number)


def _is_by_rows(captured: Captured, call: OpCall) -> bool:
    """Whether it takes one place of each row of a matrix, of the first row first."""
    source, indices = captured.samples[call.args[0].tensor], call.args[1]
    if source is None or source.dim() != 2 or len(indices) != 2 or not all(isinstance(i, Ref) for i in indices):
        return False
    places = captured.samples[indices[1].tensor]
    fits = places is not None and places.dtype is torch.int64 and tuple(places.shape) == (source.shape[0],)
    return fits and _counts(captured, indices[0].tensor, source.shape[0])


def _counts(captured: Captured, tensor: int, num_rows: int) -> bool:
    """Whether a tensor is 0, 1, 2 ... for so many rows."""
    makers = captured.graph.producers[tensor]
    call = captured.calls[makers[0]] if makers else OpCall()
    if call.kwargs.get("dtype") not in (None, torch.int64):
        return False
    known: dict[Any, tuple[Any, ...]] = {
        aten.arange.default: (num_rows,),
        aten.arange.start: (0, num_rows),
        aten.arange.start_step: (0, num_rows, 1),
        prims.iota.default: (num_rows,),
    }
    plain = call.target is not prims.iota.default or (call.kwargs.get("start"), call.kwargs.get("step")) == (0, 1)
    return call.target in known and tuple(call.args) == known[call.target] and plain and isinstance(call.args[-1], int)


def _has_a_value_a_row(captured: Captured, call: OpCall) -> bool:
    into, values = captured.samples[call.args[0].tensor], captured.samples[call.args[2].tensor]
    if into is None or values is None or call.kwargs:
        return False
    return into.dtype == values.dtype and tuple(values.shape) == (into.shape[0],)
