"""A loss of any form whose scores are worked on row by row, in slices of the rows: a pass Captured -> Captured.

    hidden, W ─> product ─> scores ─> ... ─> loss                  memfit.scores_forward ─> loss, a few numbers for each row
    d hidden, d W <─ products <─ d scores <─ ...                   d hidden, d W <─ memfit.scores_backward, from hidden and W again

What `chunked_loss` and `fused_loss` know by its pattern they do, and faster. This is for what they leave: label smoothing, class weights,
a penalty on the logarithm of the sum, soft targets, margins, a loss for each row, an accuracy beside the loss. `slicing.find_scores`
proves op by op that slices do; there is no list of losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.core.graph import Op
from memfit.passes.assemble import CycleError
from memfit.passes.interface import Context, Level, Numbers, Pass
from memfit.passes.regions.compiler import Compiler
from memfit.passes.rewriter import Rewriter
from memfit.passes.slicing.analysis import Batch, analyse_rows
from memfit.passes.slicing.find_scores import WIDER, ScoresFinder
from memfit.passes.slicing.loss_rules import MEAN, SUM
from memfit.passes.slicing.slice_blocks import replace_block, slice_size
from memfit.passes.step.chunked_loss import chunk_loss
from memfit.passes.step.fused_loss import fuse_loss
from memfit.passes.step.index_as_gather import index_as_gather
from memfit.passes.step.slice_before_product import VIEWS, rows_of, slice_before_products

aten = torch.ops.aten
_FEW, _MANY = 8, 32  # slices: more hold less, and take longer: each adds to the gradient of all weights
_NAMES = ("memfit.scores_forward", "memfit.scores_backward")
_MOST_PRODUCTS = 8  # that are tried, the widest first
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def slice_losses(
    captured: Captured, compiler: Compiler | None = None, *, num_slices: int = _FEW, least_fraction: float = 1 / 100
) -> Captured | None:
    """The same step with the scores of its losses in slices of their rows, or None where there are none that can be."""
    found: Captured | None = None
    step = _shorten_views(index_as_gather(_split_means(captured, least_fraction)))
    step = _shorten_views(slice_before_products(step, lambda c: [op for op, _ in _products(c, least_fraction)]))
    while (sliced := next(_slice_one(step, compiler, num_slices, least_fraction), None)) is not None:
        found = step = sliced
    return found


def _slice_one(captured: Captured, compiler: Compiler | None, num_slices: int, least_fraction: float) -> Iterator[Captured]:
    """The widest product whose scores can be cut: by all rows if they can be, else by samples, or by rows of each sample."""
    known: dict[tuple[int, int], Batch] = {}

    def analysis(samples: int, rows: int) -> Batch:
        """Of so many samples, each cut in so many."""
        if (samples, rows) not in known:
            known[samples, rows] = analyse_rows(captured, rows, analysis(1, samples) if samples > 1 else None)
        return known[samples, rows]

    for product, rows in _products(captured, least_fraction):
        for samples, size in _sizes(captured, product, num_slices):
            block = ScoresFinder(analysis(samples, size), product, rows).block()
            if block is None:
                continue
            length = slice_size(size, num_slices=-(-num_slices // samples), least=1)
            try:
                yield replace_block(analysis(samples, size), block, length, compiler, _NAMES)
            except (CycleError, RuntimeError):  # a view that a slice does not allow
                continue


def _products(captured: Captured, least_fraction: float) -> list[tuple[int, int]]:
    """Forward's products that make much more than they read of each row: (op, the tensor with the rows), the widest first."""
    least = max(1, int(sum(s.size_bytes for s in captured.graph.storages) * least_fraction))
    found: list[tuple[int, int, int]] = []
    for op in captured.graph.ops[: captured.boundary]:
        rows = rows_of(captured.calls[op.id])
        if rows is None:
            continue
        given, made = captured.samples[rows], captured.samples[op.outputs[0]]
        size = captured.graph.size_of(op.outputs[0])
        if given is not None and made is not None and size >= least and made.numel() >= WIDER * given.numel():
            found.append((size, op.id, rows))
    return [(op, rows) for _, op, rows in sorted(found, reverse=True)[:_MOST_PRODUCTS]]


def _sizes(captured: Captured, product: int, num_slices: int) -> list[tuple[int, int]]:
    """How the rows can be cut, the best first: (samples, pieces of each). All rows as they are, or the batch that they were before a view made
    rows of it; where that is not enough pieces, each of its samples too."""
    graph = captured.graph
    made = graph.ops[product].outputs[0]
    samples = (captured.samples[t] for t in graph.tensors_of[graph.storage_of(made)])
    found = sorted({next((n for n in s.shape if n > 1), 1) for s in samples if s is not None} - {1}, reverse=True)
    ways: list[tuple[int, int]] = []
    for size in found:
        length = found[0] // size
        ways += [(size, length)] * (size < num_slices and length > 1 and found[0] % size == 0) + [(1, size)]
    return ways


def _shorten_views(captured: Captured) -> Captured:
    """Views of views as views of what lies there: rows that became (batch, length) and rows again were rows all the time."""
    graph, calls, ops = captured.graph, list(captured.calls), list(captured.graph.ops)
    source: dict[int, int] = {}
    for op, call in zip(graph.ops, captured.calls, strict=True):
        if call.target not in VIEWS or graph.storage_of(op.inputs[0]) != graph.storage_of(op.outputs[0]):
            continue
        below = source.get(op.inputs[0], op.inputs[0])
        sample = captured.samples[below]
        source[op.outputs[0]] = below
        if below != op.inputs[0] and sample is not None and sample.is_contiguous():
            calls[op.id] = replace(call, args=(Ref(below), *call.args[1:]))
            ops[op.id] = replace(op, inputs=(below,))
    return replace(captured, graph=replace(graph, ops=tuple(ops), digest=""), calls=tuple(calls))


# -- means ----------------------------------------------------------------------------------------------------------------


def _split_means(captured: Captured, least_fraction: float) -> Captured:
    """A mean over rows as a sum, divided by the weight of the targets: slices can be added up then. Not in 16-bit floats, where a sum of
    many losses is infinite."""
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, int(total * least_fraction)))
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        if call.target in _LOSSES and call.args[3] == MEAN and rewriter.is_large(op.inputs[0]):
            _split_mean(rewriter, op, call)
    return rewriter.finish()


def _split_mean(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    loss, count = call.outputs
    if loss is None or count is None or rewriter.sample(loss).dtype is torch.float16:
        return
    total = rewriter.new_tensor(rewriter.size(loss), rewriter.sample(loss), "sum of losses")
    summing = replace(call, args=(*call.args[:3], SUM, *call.args[4:]), outputs=(total, count))
    rewriter.add_after(op.id, op.name, op.inputs, (total, count), summing)
    dividing = OpCall(target=aten.div.Tensor, args=(Ref(total), Ref(count)), outputs=(loss,))
    rewriter.add_after(op.id, "aten.div.Tensor", (total, count), (loss,), dividing)
    rewriter.remove({op.id})


# -- the pass -------------------------------------------------------------------------------------------------------------


def _run(captured: Captured, context: Context) -> Iterator[Captured]:
    """In few slices beside losses of the known pattern, where a step has both; in many slices those too, unless they are compiled."""
    known = chunk_loss(captured) if context.compiler is None else fuse_loss(captured, context.compiler)
    beside = known or captured
    for step, num_slices in ((beside, _FEW), (captured if context.compiler is None else beside, _MANY)):
        found = slice_losses(step, context.compiler, num_slices=num_slices)
        if found is not None:
            yield found


def has_wide_product(captured: Captured) -> bool:
    """Whether looking for scores can pay at all."""
    return bool(_products(captured, 1 / 200))


LOSSES_IN_ROWS = Pass(
    name="losses-in-rows",
    where="linear + any loss that is a sum over rows",
    becomes="in slices of the rows",
    saves="the logits",
    level=Level.STEP,
    numbers=Numbers.ROUNDS,
    run=_run,
    reads_products=True,
    may_apply=has_wide_product,
)
