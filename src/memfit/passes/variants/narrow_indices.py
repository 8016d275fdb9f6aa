"""Positions of a max pool in 16 or 32 bits, where they index a plane that is small enough: PyTorch keeps 64."""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.capture.lower.storages import allocated_bytes
from memfit.core.graph import Op, Variant
from memfit.kernels.layouts import make_like
from memfit.kernels.narrow_indices import MaxPoolGradientFromNarrow, NarrowIndices
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten


def _offer_narrow_indices(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """Max pooling keeps 64-bit positions in a plane; 16 or 32 bits hold them."""
    indices = call.args[-1]
    sample, maker = rewriter.sample(indices.tensor), rewriter.maker_of(indices.tensor)
    plane = rewriter.sample(call.args[1].tensor).shape[-2:].numel()
    dtype = torch.int16 if plane < 2**15 else torch.int32
    if maker is None or sample.dtype is not torch.int64 or plane >= 2**31 or not rewriter.is_large(indices.tensor):
        return
    like = make_like(sample, dtype=dtype, device="meta")
    narrow = rewriter.new_tensor(allocated_bytes(like, rewriter.granularity), like, "narrow indices")
    rewriter.add_after(
        maker.id,
        "memfit.narrow_indices",
        (indices.tensor,),
        (narrow,),
        OpCall(target=NarrowIndices(dtype), args=(indices,), outputs=(narrow,)),
    )
    inputs = tuple(narrow if t == indices.tensor else t for t in op.inputs)
    call = replace(call, target=MaxPoolGradientFromNarrow(), args=(*call.args[:-1], Ref(narrow)))
    rewriter.add_variant(op.id, Variant(name="narrow indices", inputs=inputs, outputs=op.outputs), call)


NARROW_INDICES = Pass(
    name="narrow-indices",
    where="max-pool's backward",
    becomes="16- or 32-bit positions",
    saves="most of the indices",
    level=Level.OP,
    numbers=Numbers.SAME_BITS,
    run=offer_at({aten.max_pool2d_with_indices_backward.default: _offer_narrow_indices}),
)
