"""Convolutions over slices of the batch: a slice's workspace and copies at a time.

As a form of the op where the planner may choose, as the op itself (`slice_convolutions`) for budgets below what one whole convolution takes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture.captured import Captured, OpCall
from memfit.core.graph import Op, Variant
from memfit.kernels.layouts import is_dense
from memfit.kernels.sliced_convolution import ConvolutionBackwardInSlices, ConvolutionInSlices
from memfit.passes.interface import Level, Numbers, Pass, offer_at, one_way
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_NUM_SLICES = 8
_LEAST_BATCH = 4


def slice_convolutions(captured: Captured, *, least_fraction: float = 1 / 50) -> Captured | None:
    """The same step with its largest convolutions in slices, or None where there is none."""
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, int(total * least_fraction)))
    calls = tuple(_slice(rewriter, op, call) or call for op, call in zip(captured.graph.ops, captured.calls, strict=True))
    if calls == captured.calls:
        return None
    ops = tuple(
        replace(op, name=f"{op.name} in slices") if new is not old else op
        for op, old, new in zip(captured.graph.ops, captured.calls, calls, strict=True)
    )
    return replace(captured, graph=replace(captured.graph, ops=ops, digest=""), calls=calls)


def _offer_slices(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    sliced = _slice(rewriter, op, call)
    if sliced is not None:
        rewriter.add_variant(op.id, Variant(name=f"{_NUM_SLICES} slices", inputs=op.inputs, outputs=op.outputs), sliced)


def _offer_slices_for_copies(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """Only where PyTorch would make an operand dense first, all of it at once."""
    if not all(is_dense(rewriter.sample(a.tensor)) for a in call.args[:2]):
        _offer_slices(rewriter, op, call)


def _slice(rewriter: Rewriter, op: Op, call: OpCall) -> OpCall | None:
    if call.target not in _CONVOLUTIONS:
        return None
    backward = call.target is aten.convolution_backward.default
    x = call.args[1 if backward else 0]
    batch = rewriter.sample(x.tensor).shape[0]
    if batch < _LEAST_BATCH or not rewriter.is_large(x.tensor):
        return None
    inner = ConvolutionBackwardInSlices if backward else ConvolutionInSlices
    return replace(call, target=inner(min(_NUM_SLICES, batch)))


CONVOLUTION_SLICES = Pass(
    name="convolution-slices",
    where="convolution",
    becomes="over slices of the batch",
    saves="workspace, copies",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at(dict.fromkeys(_CONVOLUTIONS, _offer_slices)),
)
COPY_SLICES = Pass(
    name="convolution-slices-for-copies",
    where="convolution of a part of a concatenation",
    becomes="over slices of the batch",
    saves="a dense copy of it",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at(dict.fromkeys(_CONVOLUTIONS, _offer_slices_for_copies)),
)
SLICED_CONVOLUTIONS = Pass(
    name="sliced-convolutions",
    where="the largest convolutions",
    becomes="all of them over slices of the batch",
    saves="workspace below that of one whole convolution",
    level=Level.STEP,
    numbers=Numbers.ROUNDS,
    run=one_way(slice_convolutions),
)
