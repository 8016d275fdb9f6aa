"""Attention written out by a model, done by a fused kernel: the matrix of scores never exists.

    written out   bmm ─ scale ─ mask ─ softmax ─ bmm          keeps queries x keys numbers per head, or makes them again
    fused         one kernel ──> out, logsumexp               keeps a number per query; its own backward reads them

Both ways stay in the step, as two optional ops: a forward that makes the same `out` and the sums its backward needs, and that
backward, which makes the same three gradients. The planner picks, and what nobody reads is not run. The mathematics is the same,
sums are in another order. Attention that drops out is left alone, because nobody else could draw the same numbers.
"""

from __future__ import annotations

import math

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.capture.lower.storages import allocated_bytes
from memfit.core.graph import Op
from memfit.kernels.implementation import HALF
from memfit.kernels.written_attention import ALIGNED, Settings, WrittenAttention, WrittenAttentionBackward, shape_sums
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter
from memfit.passes.variants.attention_pattern import Attention, find_attention

_MOST_MATRICES = 65_535  # of a batch, in one launch on CUDA


def offer_fused_attention(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """For a softmax inside attention: the fused forward and backward beside it."""
    found = find_attention(rewriter, op) if rewriter.is_large(op.outputs[0]) else None
    if found is None or not _is_supported(rewriter, found):
        return
    query = rewriter.sample(found.query)
    heads = query.shape[0] // found.examples if any(_num_matrices(rewriter, found, mask) > 1 for mask, _ in found.masks) else 1
    sums = torch.empty(shape_sums(query, heads), dtype=torch.float32 if query.dtype in HALF else query.dtype, device="meta")
    saved = rewriter.new_tensor(allocated_bytes(sums, rewriter.granularity), sums, "logsumexp")
    gradients = (found.of_query, found.of_keys, found.of_value)
    strides = tuple(tuple(rewriter.sample(t).stride()) for t in gradients)
    settings = Settings(scale=found.scale, heads=heads, signs=tuple(sign for _, sign in found.masks), strides=strides)
    given = (found.query, found.keys, found.value)
    masks = tuple(mask for mask, _ in found.masks)
    for after, name, target, inputs, outputs in (
        (found.forward, "memfit.fused_attention", WrittenAttention(settings), (*given, *masks), (found.out, saved)),
        (
            found.backward,
            "memfit.fused_attention_backward",
            WrittenAttentionBackward(settings),
            (found.gradient, *given, found.out, saved, *masks),
            gradients,
        ),
    ):
        made = OpCall(target=target, args=tuple(map(Ref, inputs)), outputs=outputs, unpack=True)
        rewriter.add_after(after, name, tuple(dict.fromkeys(inputs)), outputs, made)


def _is_supported(rewriter: Rewriter, found: Attention) -> bool:
    query, keys, value = (rewriter.sample(t) for t in (found.query, found.keys, found.value))
    out = rewriter.sample(found.out)
    alike = query.shape[2] == value.shape[2] and query.dtype == value.dtype == keys.dtype == out.dtype
    small = all(_num_matrices(rewriter, found, mask) for mask, _ in found.masks)
    if query.device.type == "cuda":
        half = query.dtype in HALF
        known = (half or query.dtype is torch.float32) and query.shape[2] % (ALIGNED // 2) == 0 and query.shape[0] <= _MOST_MATRICES
    else:
        known = query.device.type == "cpu"
    return alike and small and known and out.is_contiguous()


def _num_matrices(rewriter: Rewriter, found: Attention, mask: int) -> int:
    """1 for a mask that all examples share, their number for one each; 0 for heads that differ, which no form takes."""
    shape, scores = rewriter.sample(mask).shape, (rewriter.sample(found.query).shape[1], rewriter.sample(found.keys).shape[2])
    num = math.prod(shape[:-2])
    first = len(shape) == 4 or (len(shape) == 3 and found.examples == rewriter.sample(found.query).shape[0])
    known = num == 1 or (first and num == shape[0] == found.examples)
    broadcast = len(shape) >= 2 and all(a in (1, b) for a, b in zip(shape[-2:], scores, strict=True))
    return num if known and broadcast else 0


FUSED_ATTENTION = Pass(
    name="fused-attention",
    where="attention written out",
    becomes="a fused kernel and its backward",
    saves="the matrix of scores",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at({torch.ops.aten._softmax.default: offer_fused_attention}),
)
