"""Masks of one bit per element: what the backward of a ReLU or of dropout needs of an activation or of a mask of bytes.

    relu ──> y ──────────────> threshold_backward(g, y)
              └─> pack ─> bits ─> ... from_bits(g, bits)        an optional op, and a form that reads its result instead

Gist (ISCA 2018) calls it intermediate-activated. Nothing is replaced: the planner chooses, and what it does not choose is never run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.capture.lower.storages import round_up
from memfit.core.graph import Op, Variant
from memfit.kernels.bits import DropoutGradientFromBits, PackMask, PackSigns, ReluGradientFromBits, count_packed_bytes
from memfit.kernels.implementation import Implementation
from memfit.kernels.layouts import is_dense
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten


def _offer_relu_bits(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """threshold_backward(gradient, output, 0): the output's sign is enough."""
    gradient, output, threshold = call.args[0], call.args[1], call.args[2]
    sample = rewriter.sample(output.tensor)
    maker = rewriter.maker_of(output.tensor)
    if threshold != 0 or maker is None or not rewriter.is_large(output.tensor) or not is_dense(sample):
        return
    root = maker.outputs[0]
    bits = _add_bits(rewriter, maker, root, PackSigns(), sample)
    target = ReluGradientFromBits(tuple(sample.shape), tuple(sample.stride()))
    variant = Variant(name="from bits", inputs=(gradient.tensor, bits), outputs=op.outputs)
    rewriter.add_variant(op.id, variant, replace(call, target=target, args=(gradient, Ref(bits)), kwargs={}))


def _offer_dropout_bits(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """native_dropout_backward(gradient, mask, scale): a mask of bytes packed into bits."""
    gradient, mask, scale = call.args
    sample, maker = rewriter.sample(mask.tensor), rewriter.maker_of(mask.tensor)
    if maker is None or sample.dtype is not torch.bool or not rewriter.is_large(mask.tensor) or not is_dense(sample):
        return
    bits = _add_bits(rewriter, maker, mask.tensor, PackMask(), sample)
    target = DropoutGradientFromBits(tuple(sample.shape), tuple(sample.stride()))
    variant = Variant(name="from bits", inputs=(gradient.tensor, bits), outputs=op.outputs)
    rewriter.add_variant(op.id, variant, replace(call, target=target, args=(gradient, Ref(bits), scale)))


def _add_bits(rewriter: Rewriter, maker: Op, tensor: int, pack: Implementation, sample: torch.Tensor) -> int:
    size = count_packed_bytes(sample.numel())
    like = torch.empty((size,), dtype=torch.uint8, device="meta")
    bits = rewriter.new_tensor(round_up(size, rewriter.granularity), like, "sign bits")
    rewriter.add_after(maker.id, "memfit.pack_bits", (tensor,), (bits,), OpCall(target=pack, args=(Ref(tensor),), outputs=(bits,)))
    return bits


RELU_BITS = Pass(
    name="relu-bits",
    where="ReLU's backward",
    becomes="from one bit per element",
    saves="the activation",
    level=Level.OP,
    numbers=Numbers.SAME_BITS,
    run=offer_at({aten.threshold_backward.default: _offer_relu_bits}),
)
DROPOUT_BITS = Pass(
    name="dropout-bits",
    where="dropout's backward",
    becomes="from a packed mask",
    saves="7/8 of the mask",
    level=Level.OP,
    numbers=Numbers.SAME_BITS,
    run=offer_at({aten.native_dropout_backward.default: _offer_dropout_bits}),
)
