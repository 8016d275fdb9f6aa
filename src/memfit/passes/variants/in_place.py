"""Pointwise ops over an argument of the same shape, type and layout that is no parameter and no result: nobody else may read it any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.core.graph import Op, Variant
from memfit.kernels.in_place import InPlace
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten

_OUT: dict[Any, tuple[Any, str, tuple[int, ...]]] = {
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
"""Per op: its form that writes into a given tensor, the keyword for it, and the arguments that may be overwritten."""


def _offer_in_place(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """One form for each argument that may be written over."""
    if len(op.outputs) != 1 or not rewriter.is_large(op.outputs[0]):
        return
    overload, keyword, positions = _OUT[call.target]
    output = op.outputs[0]
    for position in positions:
        argument = call.args[position] if position < len(call.args) else None
        if isinstance(argument, Ref) and rewriter.can_overwrite(argument.tensor, output):
            variant = Variant(name="in place", inputs=op.inputs, outputs=op.outputs, inplace_of=((output, argument.tensor),))
            rewriter.add_variant(op.id, variant, replace(call, target=InPlace(overload, keyword, position)))


IN_PLACE = Pass(
    name="in-place",
    where="pointwise ops",
    becomes="over an input that nobody reads again",
    saves="a buffer",
    level=Level.OP,
    numbers=Numbers.SAME_BITS,
    run=offer_at(dict.fromkeys(_OUT, _offer_in_place)),
)
