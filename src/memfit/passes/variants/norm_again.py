"""A norm's output again from its input and the statistics that it saved: no second sum over the batch."""

from __future__ import annotations

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.core.graph import Op
from memfit.kernels.implementation import Implementation
from memfit.kernels.norms import CUDNN_BATCH_NORM, BatchNormAgain, LayerNormAgain
from memfit.passes.interface import Level, Numbers, Pass, offer_at
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
_NORMS = (aten.native_layer_norm.default, aten._native_batch_norm_legit_functional.default, CUDNN_BATCH_NORM)


def _offer_norm_again(rewriter: Rewriter, op: Op, call: OpCall) -> None:
    """An optional op beside the norm."""
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


NORM_AGAIN = Pass(
    name="norm-again",
    where="batch and layer norm",
    becomes="output again from input and statistics",
    saves="the output, and the sums over the batch",
    level=Level.OP,
    numbers=Numbers.ROUNDS,
    run=offer_at(dict.fromkeys(_NORMS, _offer_norm_again)),
)
