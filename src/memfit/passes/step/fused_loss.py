"""Linear layer + cross entropy in chunks with its gradients worked out on the way: no logits are kept, none are made twice.

    hidden, W ─> for each chunk of rows: logits ─> loss, d logits ─> d hidden, + d W        forward
    d hidden, d W  <─ times the loss's own gradient                                          backward

The loss is the last thing a step computes, so its gradient is a number that can be multiplied in later. Three matrix products
instead of four (`loss_head` makes the logits again in backward), and a kernel between them that a compiler fuses into one.
Widths that matrix units dislike (a vocabulary of 50,257) are padded, and the padding takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.capture.lower.storages import round_up
from memfit.passes.regions.compiler import Compiler, Run
from memfit.passes.rewriter import Rewriter
from memfit.passes.step.chunked_loss import Head, find_heads
from memfit.torch_private.trace import trace_function

aten = torch.ops.aten
_NUM_CHUNKS = 8
_ALIGNED = 64  # columns
_EXACT = (torch.bfloat16, torch.float32, torch.float64)  # 16-bit floats lose small gradients before the loss scale comes


def with_fused_loss(captured: Captured, compiler: Compiler, *, least_fraction: float = 1 / 100) -> Captured | None:
    """The same step with its large losses fused, or None where there is none."""
    rewriter, heads = find_heads(captured, least_fraction=least_fraction)
    fitting = [h for h in heads if rewriter.sample(captured.calls[h.linear.id].args[0].tensor).dtype in _EXACT]
    for head in fitting:
        _replace(rewriter, head, compiler)
    return rewriter.finish() if fitting else None


def _replace(rewriter: Rewriter, head: Head, compiler: Compiler) -> None:
    calls = rewriter.captured.calls
    hidden, weight = calls[head.linear.id].args[:2]
    target, _, reduction, ignore = calls[head.loss.id].args[1:5]
    tangent = calls[head.loss_backward.id].args[0]
    made = (head.weight_gradient.outputs[0], head.hidden_gradient.outputs[0])
    raw = tuple(rewriter.new_tensor(rewriter.size(t), rewriter.sample(t), "gradient for a loss gradient of 1") for t in made)
    fused = FusedLoss(compiler, reduction=reduction, ignore=ignore, dtype=head.dtype)
    outputs = (*head.loss.outputs, *raw)
    forward = OpCall(target=fused, args=(hidden, weight, target), outputs=outputs, unpack=True)
    rewriter.add_after(head.loss.id, "memfit.loss_with_gradients", (hidden.tensor, weight.tensor, target.tensor), outputs, forward)
    first = min(head.weight_gradient.id, head.hidden_gradient.id)
    for source, result in zip(raw, made, strict=True):
        call = OpCall(target=aten.mul.Tensor, args=(Ref(source), tangent), outputs=(result,))
        rewriter.add_after(first, "aten.mul.Tensor", (source, tangent.tensor), (result,), call)
    rewriter.remove(head.inside)


class FusedLoss:
    """(loss, number of targets that count, gradient of the transposed weight, gradient of hidden), both for a loss gradient of 1."""

    def __init__(self, compiler: Compiler, *, reduction: int, ignore: int, dtype: torch.dtype) -> None:
        self.compiler, self.reduction, self.ignore, self.dtype = compiler, reduction, ignore, dtype
        self.__name__ = f"fused_loss_{_NUM_CHUNKS}_{reduction}_{ignore}_{dtype}"
        self._kernels: dict[Any, Run] = {}

    @property
    def is_compiled(self) -> bool:
        """Not before it is called: who builds kernels of regions together must not call it meanwhile."""
        return bool(self._kernels)

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = (target != self.ignore).sum().to(self.dtype)
        scale = 1 / count if self.reduction == 1 else torch.ones_like(count)
        width = weight.shape[1]
        rows_of = weight.t() if width % 8 == 0 else torch.nn.functional.pad(weight.t(), (0, 0, 0, round_up(width, _ALIGNED) - width))
        wide = torch.float32 if hidden.dtype is torch.bfloat16 else hidden.dtype
        weight_gradient = torch.zeros(rows_of.shape, dtype=wide, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=self.dtype, device=hidden.device)
        chunks = (x.chunk(min(_NUM_CHUNKS, hidden.shape[0])) for x in (hidden, target, hidden_gradient))
        for rows, labels, place in zip(*chunks, strict=True):
            loss, change = self._kernel(torch.mm(rows, rows_of.t()), labels, scale, width)
            total += loss
            torch.mm(change, rows_of, out=place)
            _add_product(weight_gradient, change.t(), rows)
            del change
        result = total * scale if self.reduction == 1 else total
        return result, count, weight_gradient[:width].to(hidden.dtype, copy=width < len(rows_of)), hidden_gradient

    def _kernel(self, logits: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
        inputs = [logits, labels, scale]
        key = (tuple(logits.shape), logits.dtype, width)
        if key not in self._kernels:
            traced = trace_function(partial(self._loss_and_change, width), inputs)
            samples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
            self._kernels[key] = self.compiler.compile(traced, samples)
        del logits
        return self._kernels[key](inputs)

    def _loss_and_change(
        self, width: int, logits: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss of some rows and the gradient of their logits."""
        column = torch.arange(logits.shape[1], device=logits.device)
        scores = torch.where(column < width, logits.to(self.dtype), float("-inf"))
        largest = scores.amax(1, keepdim=True)
        parts = torch.exp(scores - largest)
        whole = parts.sum(1, keepdim=True)
        counted = (labels != self.ignore).unsqueeze(1)
        chosen = column == labels.unsqueeze(1)
        picked = torch.where(chosen, scores, 0).sum(1, keepdim=True)
        loss = torch.where(counted, torch.log(whole) + largest - picked, 0).sum()
        change = (parts / whole - chosen.to(self.dtype)) * torch.where(counted, scale, 0)
        return loss, change.to(logits.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, in the type of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b)
