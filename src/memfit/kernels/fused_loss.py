"""Linear layer + cross entropy in chunks with its gradients worked out on the way: no logits are kept, none are made twice.

    hidden, W ─> for each chunk of rows: logits ─> loss, d logits ─> d hidden, + d W

The loss is the last thing a step computes, so its gradient is a number that can be multiplied in later. Three matrix products instead
of four (`chunked_loss` makes the logits again in backward), and a kernel between them that a compiler fuses into one. Widths that matrix
units dislike (a vocabulary of 50,257) are padded, and the padding takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memfit.kernels.chunked_loss import Squash, add_product, count_chunk_logits, multiply, work_in_chunks
from memfit.kernels.compiler import Compiles, Run
from memfit.kernels.implementation import Implementation, Work, count_bytes
from memfit.torch_private.trace import trace_function

_NUM_CHUNKS = 8
_ALIGNED = 64  # columns
_LAUNCHES = 6  # for each chunk: three products, the kernel between them, two sums
_PASSES = 7  # over each logit: written, read three times by the kernel, which writes its gradient, read by two products


class FusedLoss(Implementation):
    """(loss, number of targets that count, gradients of the transposed weight, of hidden, and of a bias as a row), all for a loss gradient of 1."""

    def __init__(self, compiler: Compiles, *, reduction: int, ignore: int, dtype: torch.dtype, squash: Squash = Squash()) -> None:
        self.compiler, self.reduction, self.ignore, self.dtype, self.squash = compiler, reduction, ignore, dtype, squash
        self._kernels: dict[Any, Run] = {}

    @property
    def name(self) -> str:
        return f"fused_loss_{_NUM_CHUNKS}_{self.reduction}_{self.ignore}_{self.dtype}_{self.squash.steps}"

    @property
    def is_compiled(self) -> bool:
        """Not before it is called: who builds kernels of regions together must not call it meanwhile."""
        return bool(self._kernels)

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        count = (target != self.ignore).sum().to(self.dtype)
        scale = 1 / count if self.reduction == 1 else torch.ones_like(count)
        width = weight.shape[1]
        padding = _pad_width(width) - width
        rows_of = torch.nn.functional.pad(weight.t(), (0, 0, 0, padding)) if padding else weight.t()
        shift = torch.nn.functional.pad(bias, (0, padding)) if bias is not None and padding else bias
        bias_gradient = None if bias is None else torch.zeros((1, rows_of.shape[0]), dtype=_widen(hidden.dtype), device=hidden.device)
        weight_gradient = torch.zeros(rows_of.shape, dtype=_widen(hidden.dtype), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=self.dtype, device=hidden.device)
        chunks = (x.chunk(min(_NUM_CHUNKS, hidden.shape[0])) for x in (hidden, target, hidden_gradient))
        for rows, labels, place in zip(*chunks, strict=True):
            loss, change = self._kernel(multiply(rows, rows_of.t(), shift), labels, scale, width)
            total += loss
            torch.mm(change, rows_of, out=place)
            add_product(weight_gradient, change.t(), rows)
            if bias_gradient is not None:
                bias_gradient += change.sum(0, keepdim=True, dtype=bias_gradient.dtype)
            del change
        result = total * scale if self.reduction == 1 else total
        made = (result, count, weight_gradient[:width].to(hidden.dtype, copy=padding > 0), hidden_gradient)
        return made if bias_gradient is None else (*made, bias_gradient[:, :width].to(hidden.dtype, copy=padding > 0))

    def work(self, made: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None) -> Work:
        """Three products over all logits. Beside a chunk's logits and their gradient it holds what it pads, and what it adds up in other
        than the result's own bytes."""
        num_chunks, size = min(_NUM_CHUNKS, hidden.shape[0]), hidden.element_size()
        wide, padded = _widen(hidden.dtype), weight.shape[0] * _pad_width(weight.shape[1])
        is_padded = padded > weight.numel()
        workspace_bytes = 2 * size * count_chunk_logits(hidden, weight, num_chunks) + is_padded * size * padded
        workspace_bytes += (is_padded or wide != hidden.dtype) * wide.itemsize * padded + (wide != hidden.dtype) * size * padded
        return work_in_chunks(
            hidden,
            weight,
            num_products=3,
            launches=_LAUNCHES * num_chunks,
            workspace_bytes=workspace_bytes,
            moved_bytes=count_bytes((hidden, weight, target)) + count_bytes(made),
            bytes_per_logit=_PASSES * size,
        )

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
        squashed, kept = self.squash.apply(logits.to(self.dtype))
        scores = torch.where(column < width, squashed, float("-inf"))
        largest = scores.amax(1, keepdim=True)
        parts = torch.exp(scores - largest)
        whole = parts.sum(1, keepdim=True)
        counted = (labels != self.ignore).unsqueeze(1)
        chosen = column == labels.unsqueeze(1)
        picked = torch.where(chosen, scores, 0).sum(1, keepdim=True)
        loss = torch.where(counted, torch.log(whole) + largest - picked, 0).sum()
        change = (parts / whole - chosen.to(self.dtype)) * torch.where(counted, scale, 0)
        return loss, self.squash.pull_back(change, kept).to(logits.dtype)


def _pad_width(width: int) -> int:
    return width if width % 8 == 0 else -(-width // _ALIGNED) * _ALIGNED


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype
