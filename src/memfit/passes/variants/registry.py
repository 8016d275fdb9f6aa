"""Offers the planner other implementations: a pass Captured -> Captured that adds variants and alternative ops.

    relu ──> y ──────────────> threshold_backward(g, y)
              └─> pack ─> bits ─> ... from_bits(g, bits)        an optional op and a variant that reads its result instead

Nothing is replaced: the planner chooses, together with the schedule, and what it does not choose is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.capture.lower.storages import allocated_bytes, round_up
from memfit.core.graph import Op, Variant
from memfit.kernels.bits import DropoutGradientFromBits, PackMask, PackSigns, ReluGradientFromBits, count_packed_bytes
from memfit.kernels.implementation import Implementation
from memfit.kernels.in_place import InPlace
from memfit.kernels.layouts import is_dense, make_like
from memfit.kernels.narrow_indices import MaxPoolGradientFromNarrow, NarrowIndices
from memfit.kernels.norms import CUDNN_BATCH_NORM, BatchNormAgain, LayerNormAgain
from memfit.kernels.sliced_convolution import ConvolutionBackwardInSlices, ConvolutionInSlices
from memfit.passes.rewriter import Rewriter
from memfit.passes.variants.attention_kernels import FUSED_FORWARDS, offer_kernels
from memfit.passes.variants.attention_slices import FUSED_BACKWARDS, offer_attention_slices
from memfit.passes.variants.convolution_algorithms import CONVOLUTIONS, offer_algorithms
from memfit.passes.variants.fused_attention import offer_fused_attention

aten = torch.ops.aten
_NUM_SLICES = 8
_LEAST_BATCH = 4

_INPLACE: dict[Any, tuple[Any, str, tuple[int, ...]]] = {
    aten.relu.default: (aten.relu.out, "out", (0,)),
    aten.gelu.default: (aten.gelu.out, "out", (0,)),
    aten.silu.default: (aten.silu.out, "out", (0,)),
    aten.add.Tensor: (aten.add.out, "out", (0, 1)),
    aten.mul.Tensor: (aten.mul.out, "out", (0, 1)),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input", (0,)),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input", (0,)),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input", (0,)),
    aten.native_dropout_backward.default: (aten.native_dropout_backward.out, "out", (0,)),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out", (0,)),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input", (0,)),
}


def with_sliced_convolutions(captured: Captured, *, least_fraction: float = 1 / 50) -> Captured | None:
    """The same step with its largest convolutions in slices, or None where there is none: for budgets below a workspace."""
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, int(total * least_fraction)))
    calls = tuple(_sliced(rewriter, op, call) or call for op, call in zip(captured.graph.ops, captured.calls, strict=True))
    if calls == captured.calls:
        return None
    ops = tuple(
        replace(op, name=f"{op.name} in slices") if new is not old else op
        for op, old, new in zip(captured.graph.ops, captured.calls, calls, strict=True)
    )
    return replace(captured, graph=replace(captured.graph, ops=ops, digest=""), calls=calls)


def add_variants(captured: Captured, *, rounding: bool = False, least_fraction: float = 1 / 400) -> Captured:
    """Offer variants for ops whose outputs are at least this fraction of the step's bytes: small ones are not worth a choice.

    Without `rounding` only those that give the same bits; with it also those that add in another order.
    """
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, int(total * least_fraction)))
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        if call.role is Role.CALL:
            offer = _SAME_BITS.get(call.target) or (_OTHER_ROUNDING.get(call.target) if rounding else None)
            if offer is not None:
                offer(rewriter, op, call)
            _offer_inplace(rewriter, op, call)
    return rewriter.finish()


def with_library_forms(captured: Captured, *, least_fraction: float = 1 / 20) -> Captured:
    """The same step with other algorithms for its large convolutions and other kernels for its attention: what a compiler of
    regions leaves to libraries.

    Large is meant against the largest storage: all bytes of a step traced for a compiler are mostly values that never exist.
    """
    largest = max((s.size_bytes for s in captured.graph.storages), default=0)
    rewriter = Rewriter(captured, least_bytes=max(1, int(largest * least_fraction)))
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        if call.role is Role.CALL and (offer := _LIBRARY.get(call.target)) is not None:
            offer(rewriter, op, call)
    return rewriter.finish()


def _offer_inplace(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """Write over an argument of the same shape, type and strides that is no parameter and no result."""
    if call.target not in _INPLACE or len(op.outputs) != 1 or not rewriter.is_large(op.outputs[0]):
        return
    overload, keyword, positions = _INPLACE[call.target]
    output = op.outputs[0]
    for position in positions:
        argument = call.args[position] if position < len(call.args) else None
        if isinstance(argument, Ref) and rewriter.can_overwrite(argument.tensor, output):
            variant = Variant(name="in place", inputs=op.inputs, outputs=op.outputs, inplace_of=((output, argument.tensor),))
            rewriter.add_variant(op.id, variant, replace(call, target=InPlace(overload, keyword, position)))


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


def _offer_norm_apply(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """A norm's output again from its input and saved statistics."""
    output, mean, deviation = call.outputs[:3]
    x, weight, bias = call.args[:3] if "layer_norm" not in op.name else (call.args[0], call.args[2], call.args[3])
    if not all(isinstance(a, Ref) for a in (x, weight, bias)) or None in (output, mean, deviation) or not rewriter.is_large(op.outputs[0]):
        return
    assert output is not None
    args = (x, weight, bias, Ref(mean), Ref(deviation))  # type: ignore[arg-type]
    inputs = tuple(dict.fromkeys(a.tensor for a in args))
    if "layer_norm" in op.name:
        target: Implementation = LayerNormAgain()
    else:
        target, args = BatchNormAgain(), (*args, call.args[7])  # type: ignore[assignment]
    rewriter.add_after(op.id, "memfit.norm_apply", inputs, (output,), OpCall(target=target, args=args, outputs=(output,)))


def _offer_less_workspace(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """Convolutions by other algorithms, and over slices of the batch."""
    offer_algorithms(rewriter, op, call)
    _offer_sliced(rewriter, op, call)


def _offer_sliced(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    sliced = _sliced(rewriter, op, call)
    if sliced is not None:
        rewriter.add_variant(op.id, Variant(name=f"{_NUM_SLICES} slices", inputs=op.inputs, outputs=op.outputs), sliced)


def _offer_without_copies(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """Convolutions by other algorithms; over slices only where PyTorch would make an operand dense first, all of it at once."""
    offer_algorithms(rewriter, op, call)
    operands = (rewriter.sample(a.tensor) for a in call.args[:2])
    if not all(is_dense(sample) for sample in operands):
        _offer_sliced(rewriter, op, call)


def _sliced(rewriter: Rewriter, op: Op, call: OpCall) -> OpCall | None:
    if call.target not in (aten.convolution.default, aten.convolution_backward.default):
        return None
    backward = call.target is aten.convolution_backward.default
    x = call.args[1 if backward else 0]
    batch = rewriter.sample(x.tensor).shape[0]
    if batch < _LEAST_BATCH or not rewriter.is_large(x.tensor):
        return None
    inner = ConvolutionBackwardInSlices if backward else ConvolutionInSlices
    return replace(call, target=inner(min(_NUM_SLICES, batch)))


_SAME_BITS: dict[Any, Callable[[Rewriter, Op, OpCall], None]] = {
    aten.threshold_backward.default: _offer_relu_bits,
    aten.native_dropout_backward.default: _offer_dropout_bits,
    aten.max_pool2d_with_indices_backward.default: _offer_narrow_indices,
}
_OTHER_ROUNDING: dict[Any, Callable[[Rewriter, Op, OpCall], None]] = {
    aten.native_layer_norm.default: _offer_norm_apply,
    aten._native_batch_norm_legit_functional.default: _offer_norm_apply,
    CUDNN_BATCH_NORM: _offer_norm_apply,
    aten.convolution.default: _offer_less_workspace,
    aten.convolution_backward.default: _offer_less_workspace,
    aten._softmax.default: offer_fused_attention,
    **dict.fromkeys(FUSED_FORWARDS, offer_kernels),
    **dict.fromkeys(FUSED_BACKWARDS, offer_attention_slices),
}
_LIBRARY: dict[Any, Callable[[Rewriter, Op, OpCall], None]] = {
    **dict.fromkeys(CONVOLUTIONS, _offer_without_copies),
    **dict.fromkeys(FUSED_FORWARDS, offer_kernels),
}
