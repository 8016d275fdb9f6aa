"""Finds linear layer + log-softmax + negative log-likelihood, and does the whole in chunks: the logits never exist at once.

    hidden, W, bias ─> mm or addmm ─> (soft cap) ─> (to fp32) ─> log_softmax ─> nll_loss ─> loss          forward
    d hidden, d W, d bias <─ mm, mm, sum <─ (to bf16) <─ log_softmax' <─ nll_loss' <─ tangent     backward

Two ops replace the rows; they make the same tensors (loss and count; the gradients of W, hidden and bias). For a language model
with a large vocabulary the logits and their copies are most of the peak. The choice is all or nothing, so it is made between
two captures rather than op by op.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.graph import Op
from memfit.kernels.chunked_loss import ChunkedLoss, ChunkedLossBackward, Squash
from memfit.passes.interface import Level, Numbers, Pass, one_way
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
_NUM_CHUNKS = 8
_GRADIENTS = {"mul": aten.mul.Tensor, "div": aten.div.Tensor, "tanh": aten.tanh_backward.default}
_REDUCTIONS = (1, 2)  # mean and sum: without one there is a loss for each row
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The ops of one linear layer + cross entropy, forward and backward. `operands`: hidden, weight and, if it has one, bias."""

    operands: tuple[Ref, ...]
    loss: Op
    weight_gradient: Op
    hidden_gradient: Op
    bias_gradient: Op | None
    loss_backward: Op
    dtype: torch.dtype
    squash: Squash
    inside: set[int]  # the ops it stands for

    @property
    def gradients(self) -> tuple[Op, ...]:
        """Of weight, hidden and, if it has one, bias."""
        return (self.weight_gradient, self.hidden_gradient, *(() if self.bias_gradient is None else (self.bias_gradient,)))


def chunk_loss(captured: Captured, *, least_fraction: float = 1 / 100) -> Captured | None:
    """The same step with its large losses in chunks, or None where there is none."""
    rewriter, heads = find_heads(captured, least_fraction=least_fraction)
    for head in heads:
        _replace(rewriter, head)
    return rewriter.finish() if heads else None


def find_heads(captured: Captured, *, least_fraction: float) -> tuple[Rewriter, list[Head]]:
    """Losses whose logits are at least this fraction of the step's bytes, and a rewriter to replace them with."""
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, int(total * least_fraction)))
    found = (_find(rewriter, op) for op in _softmaxes(captured) if rewriter.is_large(op.outputs[0]))
    return rewriter, [head for head in found if head is not None]


def has_large_loss(captured: Captured, *, least_fraction: float = 1 / 200) -> bool:
    """Whether looking for a loss worth doing in chunks can pay at all."""
    total = sum(s.size_bytes for s in captured.graph.storages)
    return any(captured.graph.size_of(op.outputs[0]) >= total * least_fraction for op in _softmaxes(captured))


def _softmaxes(captured: Captured) -> list[Op]:
    return [op for op in captured.graph.ops if captured.calls[op.id].target is aten._log_softmax.default]


def _replace(rewriter: Rewriter, head: Head) -> None:
    calls = rewriter.captured.calls
    target, _, reduction, ignore = calls[head.loss.id].args[1:5]
    tangent, count = calls[head.loss_backward.id].args[0], calls[head.loss_backward.id].args[6]
    rows = rewriter.sample(head.operands[0].tensor).shape[0]
    settings = {"num_chunks": min(_NUM_CHUNKS, rows), "reduction": reduction, "ignore": ignore, "dtype": head.dtype, "squash": head.squash}
    read = (*head.operands[:2], target, *head.operands[2:])
    forward = OpCall(target=ChunkedLoss(**settings), args=read, outputs=head.loss.outputs, unpack=True)
    rewriter.add_after(head.loss.id, "memfit.chunked_loss", tuple(r.tensor for r in read), head.loss.outputs, forward)
    made = tuple(op.outputs[0] for op in head.gradients)
    read = (tangent, *head.operands[:2], target, count, *head.operands[2:])
    backward = OpCall(target=ChunkedLossBackward(**settings), args=read, outputs=made, unpack=True)
    first = min(op.id for op in head.gradients)
    rewriter.add_after(first, "memfit.chunked_loss_backward", tuple(dict.fromkeys(r.tensor for r in read)), made, backward)
    rewriter.remove(head.inside)


def _find(rewriter: Rewriter, softmax: Op) -> Head | None:
    """The pattern around one log-softmax, or None when anything else reads the logits. Any arrow may pass through a cast."""
    calls = rewriter.captured.calls
    pattern = _Pattern(rewriter)
    if calls[softmax.id].args[1] not in (1, -1):
        return None
    pattern.add(softmax)
    linear, squash = pattern.before(softmax)
    loss = pattern.after(softmax, aten.nll_loss_forward.default)
    loss_backward = pattern.after(softmax, aten.nll_loss_backward.default)
    change = pattern.after(loss_backward, aten._log_softmax_backward_data.default)
    change = pattern.back_through(change, squash)
    gradients = pattern.all_after(change, aten.mm.default)
    if linear is None or loss is None or loss_backward is None or len(gradients) != 2:
        return None
    operands = _operands_of(calls[linear.id])
    sums = pattern.all_after(change, aten.sum.dim_IntList)
    if not operands or [calls[op.id].args[1:] for op in sums] != [([0], True)] * (len(operands) - 2):
        return None
    weights, reduction = calls[loss.id].args[2:4]
    if weights is not None or reduction not in _REDUCTIONS or not pattern.is_closed():
        return None
    by_weight = [g for g in gradients if _is_weight_gradient(rewriter, g, operands[0])]
    if len(by_weight) != 1:
        return None
    by_hidden = gradients[0] if gradients[1] is by_weight[0] else gradients[1]
    if not _is_row_by_row(rewriter, linear, operands, (softmax, loss), (by_weight[0], by_hidden, *sums)):
        return None
    return Head(
        operands=operands,
        loss=loss,
        weight_gradient=by_weight[0],
        hidden_gradient=by_hidden,
        bias_gradient=sums[0] if sums else None,
        loss_backward=loss_backward,
        dtype=rewriter.sample(loss.outputs[0]).dtype,
        squash=squash,
        inside=pattern.ops | pattern.views(),
    )


class _Pattern:
    """Collects the ops of a pattern and the storages between them."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph, self.calls = rewriter, rewriter.graph, rewriter.captured.calls
        self.ops: set[int] = set()
        self.storages: set[int] = set()

    def add(self, op: Op) -> None:
        """An op whose output is read inside the pattern."""
        self.ops.add(op.id)
        self.storages.add(self.graph.storage_of(op.outputs[0]))

    def before(self, op: Op) -> tuple[Op | None, Squash]:
        """The product that this op's first input comes from, through casts, and what is done to it on the way."""
        steps: list[tuple[str, float]] = []
        source = self.rewriter.maker_of(op.inputs[0])
        while source is not None and (step := _step_of(self.calls[source.id])) is not None:
            self.add(source)
            steps += step
            source = self.rewriter.maker_of(source.inputs[0])
        if source is not None:
            self.add(source)
        return source, Squash(tuple(reversed(steps)))

    def back_through(self, op: Op | None, squash: Squash) -> Op | None:
        """The op that makes the gradient of the logits from this one's, of what they became."""
        for kind, number in reversed(squash.steps):
            op = self.after(op, _GRADIENTS[kind])
            if op is None:
                return None
            other = self.calls[op.id].args[1]
            fits = isinstance(other, Ref) and self.graph.storage_of(other.tensor) in self.storages if kind == "tanh" else other == number
            if not fits:
                return None
        return op

    def after(self, op: Op | None, target: object) -> Op | None:
        """The one op of this kind that reads an op's output, through a cast; the loss itself leaves the pattern."""
        found = self.all_after(op, target)
        if len(found) != 1:
            return None
        if target is not aten.nll_loss_forward.default:
            self.add(found[0])
        return found[0]

    def all_after(self, op: Op | None, target: object) -> list[Op]:
        if op is None:
            return []
        found = _readers(self.rewriter, op.outputs[0], target)
        for cast in (c for kind in _CASTS for c in _readers(self.rewriter, op.outputs[0], kind)):
            beyond = _readers(self.rewriter, cast.outputs[0], target)
            if beyond:
                self.add(cast)
                found += beyond
        self.ops |= {o.id for o in found}
        return found

    def views(self) -> set[int]:
        readers = {r for s in self.storages for t in self.graph.tensors_of[s] for r in self.graph.readers[t]}
        return readers - self.ops

    def is_closed(self) -> bool:
        """Whether nothing but the pattern and views reads what is inside, and none of it is kept."""
        kept = {self.graph.storage_of(t) for t in (*self.graph.sources, *self.graph.results)}
        return not (self.storages & kept) and all(self._is_view(r) for r in self.views())

    def _is_view(self, reader: int) -> bool:
        op = self.graph.ops[reader]
        return self.calls[reader].role is Role.CALL and all(self.graph.is_view(op, t) for t in op.outputs)


def _is_weight_gradient(rewriter: Rewriter, op: Op, hidden: Ref) -> bool:
    """mm(transposed change, hidden): the one that reads hidden."""
    second = rewriter.captured.calls[op.id].args[1]
    return rewriter.graph.storage_of(second.tensor) == rewriter.graph.storage_of(hidden.tensor)


def _step_of(call: OpCall) -> list[tuple[str, float]] | None:
    """What a call does to each number: nothing for a cast, None if it does anything else."""
    if call.target in _CASTS:
        return []
    if call.target is aten.tanh.default:
        return [("tanh", 0.0)]
    kind = "mul" if call.target is aten.mul.Tensor else "div" if call.target is aten.div.Tensor else None
    if kind is None or call.kwargs or not isinstance(call.args[0], Ref) or not isinstance(call.args[1], (int, float)):
        return None
    return [(kind, float(call.args[1]))]


def _operands_of(call: OpCall) -> tuple[Ref, ...]:
    """Hidden, weight and bias of a product; empty of anything else. A bias is a row of its own width."""
    if call.kwargs or len(call.args) != (3 if call.target is aten.addmm.default else 2):
        return ()
    if call.target is aten.mm.default:
        return tuple(call.args)
    return (call.args[1], call.args[2], call.args[0]) if call.target is aten.addmm.default else ()


def _is_row_by_row(rewriter: Rewriter, linear: Op, operands: tuple[Ref, ...], losses: tuple[Op, Op], gradients: tuple[Op, ...]) -> bool:
    """Whether views between the ops only put the same rows of logits in other words: a transpose has them in another order, a slice not all."""
    hidden, weight, *bias = operands
    rows, width = rewriter.sample(linear.outputs[0]).shape
    by_weight, by_hidden, *by_bias = gradients
    change = rewriter.captured.calls[by_hidden.id].args[:2]
    inputs = [rewriter.sample(op.inputs[0]) for op in losses]
    return (
        all(t.shape[-1] == width and t.numel() == rows * width and t.is_contiguous() for t in inputs)
        and rewriter.sample(change[0].tensor).shape == (rows, width)
        and rewriter.graph.storage_of(change[1].tensor) == rewriter.graph.storage_of(weight.tensor)
        and rewriter.sample(by_hidden.outputs[0]).shape == rewriter.sample(hidden.tensor).shape
        and rewriter.sample(by_weight.outputs[0]).shape == rewriter.sample(weight.tensor).shape[::-1]
        and all(rewriter.sample(b.tensor).shape == (width,) for b in bias)
        and all(rewriter.sample(op.inputs[0]).shape == (rows, width) for op in by_bias)
    )


def _readers(rewriter: Rewriter, tensor: int, target: object) -> list[Op]:
    """Ops of one kind that read the storage behind a tensor, through whatever views."""
    graph = rewriter.graph
    readers = {r for t in graph.tensors_of[graph.storage_of(tensor)] for r in graph.readers[t]}
    return [graph.ops[r] for r in sorted(readers) if rewriter.captured.calls[r].target is target]


CHUNKED_LOSS = Pass(
    name="chunked-loss",
    where="linear + cross entropy",
    becomes="in chunks of rows",
    saves="the logits",
    level=Level.STEP,
    numbers=Numbers.ROUNDS,
    run=one_way(chunk_loss),
)
