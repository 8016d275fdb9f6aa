"""Finds linear layer + log-softmax + negative log-likelihood, and does the whole in chunks: the logits never exist at once.

    hidden, W ─> mm ─> (to fp32) ─> log_softmax ─> nll_loss ─> loss          forward
    d hidden, d W <─ mm, mm <─ (to bf16) <─ log_softmax' <─ nll_loss' <─ tangent     backward

Two ops replace the rows; they make the same tensors (loss and count; the gradients of W and hidden). For a language model
with a large vocabulary the logits and their copies are most of the peak. The choice is all or nothing, so it is made between
two captures rather than op by op.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from memfit.capture import implementations as impl
from memfit.capture.captured import Captured, OpCall, Role
from memfit.capture.rewrite import Rewriter
from memfit.core.graph import Op

aten = torch.ops.aten
_NUM_CHUNKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    linear: Op
    loss: Op
    weight_gradient: Op
    hidden_gradient: Op
    loss_backward: Op
    dtype: torch.dtype
    inside: set[int]  # the ops it stands for


def with_chunked_loss(captured: Captured, *, least_fraction: float = 1 / 100) -> Captured | None:
    """The same step with its large losses in chunks, or None where there is none."""
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, int(total * least_fraction)))
    found = False
    for op in captured.graph.ops:
        if captured.calls[op.id].target is aten._log_softmax.default and rewriter.is_large(op.outputs[0]):
            head = _find(rewriter, op)
            if head is not None:
                _replace(rewriter, head)
                found = True
    return rewriter.finish() if found else None


def _replace(rewriter: Rewriter, head: _Head) -> None:
    calls = rewriter.captured.calls
    hidden, weight = calls[head.linear.id].args[:2]
    target, _, reduction, ignore = calls[head.loss.id].args[1:5]
    tangent, count = calls[head.loss_backward.id].args[0], calls[head.loss_backward.id].args[6]
    rows = rewriter.sample(hidden.tensor).shape[0]
    chunks = min(_NUM_CHUNKS, rows)
    forward = OpCall(
        target=partial(impl.chunked_loss, chunks),
        args=(hidden, weight, target, reduction, ignore, head.dtype),
        outputs=head.loss.outputs,
        unpack=True,
    )
    rewriter.add_after(head.loss.id, "memfit.chunked_loss", (hidden.tensor, weight.tensor, target.tensor), head.loss.outputs, forward)
    made = (head.weight_gradient.outputs[0], head.hidden_gradient.outputs[0])
    backward = OpCall(
        target=partial(impl.chunked_loss_backward, chunks),
        args=(tangent, hidden, weight, target, count, reduction, ignore, head.dtype),
        outputs=made,
        unpack=True,
    )
    inputs = tuple(dict.fromkeys((tangent.tensor, hidden.tensor, weight.tensor, target.tensor, count.tensor)))
    first = min(head.weight_gradient.id, head.hidden_gradient.id)
    rewriter.add_after(first, "memfit.chunked_loss_backward", inputs, made, backward)
    rewriter.remove(head.inside)


def _find(rewriter: Rewriter, softmax: Op) -> _Head | None:
    """The pattern around one log-softmax, or None when anything else reads the logits."""
    graph, calls = rewriter.graph, rewriter.captured.calls
    if calls[softmax.id].args[1] not in (1, -1):
        return None
    source = rewriter.maker_of(softmax.inputs[0])
    chain = {graph.storage_of(softmax.outputs[0])}
    dtype = rewriter.sample(softmax.outputs[0]).dtype
    if source is not None and calls[source.id].target is aten._to_copy.default:
        chain.add(graph.storage_of(source.outputs[0]))
        source = rewriter.maker_of(source.inputs[0])
    if source is None or calls[source.id].target is not aten.mm.default:
        return None
    chain.add(graph.storage_of(source.outputs[0]))
    losses = _readers(rewriter, softmax.outputs[0], aten.nll_loss_forward.default)
    steps = _readers(rewriter, softmax.outputs[0], aten.nll_loss_backward.default)
    if len(losses) != 1 or len(steps) != 1 or calls[losses[0].id].args[2] is not None:
        return None
    change = _readers(rewriter, steps[0].outputs[0], aten._log_softmax_backward_data.default)
    if len(change) != 1:
        return None
    logits_gradient = change[0].outputs[0]
    chain |= {graph.storage_of(steps[0].outputs[0]), graph.storage_of(logits_gradient)}
    narrowed = _readers(rewriter, logits_gradient, aten._to_copy.default)
    if narrowed:
        logits_gradient = narrowed[0].outputs[0]
        chain.add(graph.storage_of(logits_gradient))
    gradients = _readers(rewriter, logits_gradient, aten.mm.default)
    inside = {softmax.id, source.id, losses[0].id, steps[0].id, change[0].id, *(o.id for o in narrowed), *(o.id for o in gradients)}
    inside |= {
        op.id for op in graph.ops if calls[op.id].target is aten._to_copy.default and set(map(graph.storage_of, op.outputs)) <= chain
    }
    if len(gradients) != 2 or not _only_inside(rewriter, chain, inside):
        return None
    views = {r for s in chain for t in graph.tensors_of[s] for r in graph.readers[t]} - inside
    first, second = gradients
    by_weight = first if _is_weight_gradient(rewriter, first, source) else second
    by_hidden = second if by_weight is first else first
    if not _is_weight_gradient(rewriter, by_weight, source):
        return None
    return _Head(
        linear=source,
        loss=losses[0],
        weight_gradient=by_weight,
        hidden_gradient=by_hidden,
        loss_backward=steps[0],
        dtype=dtype,
        inside=inside | views,
    )


def _is_weight_gradient(rewriter: Rewriter, op: Op, linear: Op) -> bool:
    """mm(transposed change, hidden): the one that reads hidden."""
    hidden = rewriter.captured.calls[linear.id].args[0]
    second = rewriter.captured.calls[op.id].args[1]
    return rewriter.graph.storage_of(second.tensor) == rewriter.graph.storage_of(hidden.tensor)


def _readers(rewriter: Rewriter, tensor: int, target: object) -> list[Op]:
    """Ops of one kind that read the storage behind a tensor, through whatever views."""
    graph = rewriter.graph
    readers = {r for t in graph.tensors_of[graph.storage_of(tensor)] for r in graph.readers[t]}
    return [graph.ops[r] for r in sorted(readers) if rewriter.captured.calls[r].target is target]


def _only_inside(rewriter: Rewriter, chain: set[int], inside: set[int]) -> bool:
    """Whether nothing but the pattern and views reads the storages of the pattern, and none of them is kept."""
    graph = rewriter.graph
    if chain & {graph.storage_of(t) for t in (*graph.sources, *graph.results)}:
        return False
    for storage in chain:
        for tensor in graph.tensors_of[storage]:
            for reader in graph.readers[tensor]:
                op, call = graph.ops[reader], rewriter.captured.calls[reader]
                view = call.role is Role.CALL and all(graph.is_view(op, t) for t in op.outputs)
                if reader not in inside and not view:
                    return False
    return True
