"""A linear layer + cross entropy that works its gradients out on the way: a pass Captured -> Captured.

hidden, W ─> memfit.loss_with_gradients ─> loss, d hidden, d W        forward
d hidden, d W  <─ times the loss's own gradient                       backward
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.kernels.fused_loss import FusedLoss
from memfit.passes.interface import Context, Level, Numbers, Pass
from memfit.passes.regions.compiler import Compiler
from memfit.passes.rewriter import Rewriter
from memfit.passes.step.chunked_loss import Head, find_heads, has_large_loss

aten = torch.ops.aten
_EXACT = (torch.bfloat16, torch.float32, torch.float64)  # 16-bit floats lose small gradients before the loss scale comes


def fuse_loss(captured: Captured, compiler: Compiler, *, least_fraction: float = 1 / 100) -> Captured | None:
    """The same step with its large losses fused, or None where there is none."""
    rewriter, heads = find_heads(captured, least_fraction=least_fraction)
    fitting = [h for h in heads if rewriter.sample(h.operands[0].tensor).dtype in _EXACT]
    for head in fitting:
        _replace(rewriter, head, compiler)
    return rewriter.finish() if fitting else None


def _replace(rewriter: Rewriter, head: Head, compiler: Compiler) -> None:
    calls = rewriter.captured.calls
    target, _, reduction, ignore = calls[head.loss.id].args[1:5]
    tangent = calls[head.loss_backward.id].args[0]
    made = tuple(op.outputs[0] for op in head.gradients)
    raw = tuple(rewriter.new_tensor(rewriter.size(t), rewriter.sample(t), "gradient for a loss gradient of 1") for t in made)
    fused = FusedLoss(compiler, reduction=reduction, ignore=ignore, dtype=head.dtype, squash=head.squash)
    outputs = (*head.loss.outputs, *raw)
    read = (*head.operands[:2], target, *head.operands[2:])
    forward = OpCall(target=fused, args=read, outputs=outputs, unpack=True)
    rewriter.add_after(head.loss.id, "memfit.loss_with_gradients", tuple(r.tensor for r in read), outputs, forward)
    first = min(op.id for op in head.gradients)
    for source, result in zip(raw, made, strict=True):
        call = OpCall(target=aten.mul.Tensor, args=(Ref(source), tangent), outputs=(result,))
        rewriter.add_after(first, "aten.mul.Tensor", (source, tangent.tensor), (result,), call)
    rewriter.remove(head.inside)


def _run(captured: Captured, context: Context) -> Iterable[Captured]:
    assert context.compiler is not None
    found = fuse_loss(captured, context.compiler)
    return () if found is None else (found,)


FUSED_LOSS = Pass(
    name="fused-loss",
    where="linear + cross entropy",
    becomes="gradients worked out on the way forward, in chunks of rows",
    saves="the logits",
    level=Level.STEP,
    numbers=Numbers.ROUNDS,
    run=_run,
    reads_products=True,
    may_apply=has_large_loss,
)
