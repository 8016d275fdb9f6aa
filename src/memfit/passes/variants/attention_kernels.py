"""Which fused kernel does attention: PyTorch picks one by rule, and others give the same in other time.

    flash       ──> out, its sums ──> flash's backward
    cudnn       ──> out, its sums ──> cudnn's backward        the other kernel's pair beside it, as forms of the same two ops

A backward goes with its own forward: they share the logarithms of sums, which each kernel keeps in a shape of its own. `out` is
the same tensor either way. For attention without dropout and without a mask on CUDA; kernels that PyTorch was told not to use
are not offered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.capture.lower.storages import allocated_bytes
from memfit.core.graph import Op, Variant
from memfit.kernels.fused_attention import KERNELS, AttentionBackwardBy, AttentionBy, Kernel
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter
from memfit.passes.variants.attention_slices import arguments_of

FUSED_FORWARDS = tuple(KERNELS)


def offer_kernels(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """Other kernels for a fused attention whose backward is in the step."""
    backward = _backward_of(rewriter, call)
    if backward is None or call.outputs[0] is None or not rewriter.is_large(call.outputs[0]):
        return
    arguments = arguments_of(rewriter.captured.calls[backward.id])
    query = rewriter.sample(arguments.query.tensor)
    if arguments.dropout != 0 or arguments.mask is not None or any(t is None for t in backward.outputs[:3]):
        return
    for target, kernel in KERNELS.items():
        if target is not call.target and _can_use(rewriter, kernel, arguments):
            sums = torch.empty(kernel.sums_shape(query), dtype=torch.float32, device="meta")
            saved = rewriter.new_tensor(allocated_bytes(sums, rewriter.granularity), sums, f"{kernel.name}'s logsumexp")
            _offer(rewriter, op, backward, kernel, saved)


def _offer(rewriter: Rewriter, forward: Op, backward: Op, kernel: Kernel, saved: int) -> None:
    calls = rewriter.captured.calls
    a = arguments_of(calls[backward.id])
    out = calls[forward.id].outputs[0]
    assert out is not None
    given = (a.query, a.key, a.value)
    named = f"{kernel.name} kernel"

    def strides_of(tensors: tuple[int | None, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rewriter.sample(t).stride()) for t in tensors if t is not None)

    (of_out,) = strides_of((out,))
    made = OpCall(target=AttentionBy(kernel, of_out), args=(*given, a.is_causal, a.scale), outputs=(out, saved), unpack=True)
    inputs = tuple(dict.fromkeys(x.tensor for x in given))
    rewriter.add_variant(forward.id, Variant(name=named, inputs=inputs, outputs=(out, saved)), made)
    gradients = calls[backward.id].outputs[:3]
    target = AttentionBackwardBy(kernel, strides_of(gradients))
    args = (a.gradient, *given, Ref(out), Ref(saved), a.is_causal, a.scale)
    inputs = tuple(dict.fromkeys(x.tensor for x in args if isinstance(x, Ref)))
    variant = Variant(name=named, inputs=inputs, outputs=backward.outputs)
    rewriter.add_variant(backward.id, variant, replace(calls[backward.id], target=target, args=args, kwargs={}, outputs=gradients))


def _backward_of(rewriter: Rewriter, call: OpCall) -> Op | None:
    """The one op that reads what this forward's kernel keeps, if it is that kernel's backward. Views may lie between."""
    graph, calls = rewriter.graph, rewriter.captured.calls
    out, sums = (*call.outputs, None, None)[:2]
    if out is None or sums is None:
        return None
    readers = {r for t in graph.tensors_of[graph.storage_of(sums)] for r in graph.readers[t]}
    ops = [op for op in (graph.ops[r] for r in readers) if not all(graph.is_view(op, t) for t in op.outputs)]
    if len(ops) != 1 or calls[ops[0].id].target is not KERNELS[call.target].backward_op:
        return None
    a = arguments_of(calls[ops[0].id])
    pairs = zip((*(x.tensor for x in call.args[:3]), out), (x.tensor for x in (a.query, a.key, a.value, a.out)), strict=True)
    return ops[0] if all(_are_one(rewriter, *pair) for pair in pairs) else None


def _are_one(rewriter: Rewriter, one: int, other: int) -> bool:
    a, b = rewriter.sample(one), rewriter.sample(other)
    same = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return same and rewriter.graph.storage_of(one) == rewriter.graph.storage_of(other)


def _can_use(rewriter: Rewriter, kernel: Kernel, arguments: Any) -> bool:
    """By PyTorch's own rules, on a device that is here."""
    q, k, v = (rewriter.sample(x.tensor) for x in (arguments.query, arguments.key, arguments.value))
    if q.device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    try:
        return kernel.can_use(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, arguments.is_causal, False))
    except (RuntimeError, TypeError):
        return False


ATTENTION_KERNELS = Pass(
    name="attention-kernels",
    where="fused attention",
    becomes="another fused kernel and its backward",
    saves="time",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at(dict.fromkeys(FUSED_FORWARDS, offer_kernels)),
)
