"""Linear layer + cross entropy a chunk of rows at a time: the logits never exist whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.implementation import HALF, Implementation, Work, count_bytes

_FORWARD_BYTES, _BACKWARD_BYTES = (12, 16), (28, 34)
"""Written and read for each logit, in 32 bits and in 16: product, cast, softmax; scaling, cast back, two more products."""

_LAUNCHES = 8  # for each chunk


@dataclass(frozen=True, slots=True)
class Squash:
    """What a model does to its logits before the softmax, one number at a time: `steps` are ("mul", c), ("div", c) and ("tanh", 0), in order.

    A soft cap is div, tanh, mul; a temperature div; nothing is the empty one.
    """

    steps: tuple[tuple[str, float], ...] = ()

    def apply(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The scores, and what their derivative needs."""
        kept: list[torch.Tensor] = []
        for kind, number in self.steps:
            x = torch.tanh(x) if kind == "tanh" else x * number if kind == "mul" else x / number
            if kind == "tanh":
                kept.append(x)
        return x, kept

    def pull_back(self, change: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        """The gradient of the logits, from that of the scores."""
        left = list(kept)
        for kind, number in reversed(self.steps):
            if kind == "tanh":
                y = left.pop()
                change = change * (1 - y * y)
            else:
                change = change * number if kind == "mul" else change / number
        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss(Implementation):
    """(cross entropy of hidden @ weight + bias, squashed, number of targets that count)."""

    num_chunks: int
    reduction: int  # 1 for the mean, else the sum
    ignore: int
    dtype: torch.dtype
    squash: Squash = Squash()

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=self.dtype, device=hidden.device)
        for rows, labels in zip(hidden.chunk(self.num_chunks), target.chunk(self.num_chunks), strict=True):
            logits, _ = self.squash.apply(multiply(rows, weight, bias).to(self.dtype))
            total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=self.ignore, reduction="sum")
            del logits
        count = (target != self.ignore).sum().to(self.dtype)
        return (total / count if self.reduction == 1 else total), count

    def work(self, made: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None) -> Work:
        chunk_bytes = 12 * count_chunk_logits(hidden, weight, self.num_chunks)
        moved_bytes = count_bytes((hidden, weight, target)) + count_bytes(made)
        return work_in_chunks(
            hidden,
            weight,
            num_products=1,
            launches=_LAUNCHES * self.num_chunks,
            workspace_bytes=chunk_bytes,
            moved_bytes=moved_bytes,
            bytes_per_logit=_FORWARD_BYTES[hidden.dtype in HALF],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLossBackward(Implementation):
    """(gradients of the transposed weight, of hidden, and of a bias as a row); those of weight and bias are added up in at least 32 bits."""

    num_chunks: int
    reduction: int
    ignore: int
    dtype: torch.dtype
    squash: Squash = Squash()

    def __call__(
        self,
        tangent: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        count: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        scale = (tangent / count if self.reduction == 1 else tangent).to(self.dtype)
        wide = torch.float32 if hidden.dtype in HALF else hidden.dtype
        weight_gradient = torch.zeros((weight.shape[1], weight.shape[0]), dtype=wide, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        bias_gradient = None if bias is None else torch.zeros((1, weight.shape[1]), dtype=wide, device=hidden.device)
        for rows, labels, place in zip(*(x.chunk(self.num_chunks) for x in (hidden, target, hidden_gradient)), strict=True):
            scores, kept = self.squash.apply(multiply(rows, weight, bias).to(self.dtype))
            change = torch.softmax(scores, 1)
            del scores
            counted = labels != self.ignore
            safe = torch.where(counted, labels, 0).unsqueeze(1)
            change.scatter_add_(1, safe, torch.full_like(safe, -1, dtype=self.dtype))
            change.mul_((counted * scale).unsqueeze(1))
            narrow = self.squash.pull_back(change, kept).to(hidden.dtype)
            del change, kept
            torch.mm(narrow, weight.t(), out=place)
            add_product(weight_gradient, narrow.t(), rows)
            if bias_gradient is not None:
                bias_gradient += narrow.sum(0, keepdim=True, dtype=wide)
            del narrow
        made = (weight_gradient.to(hidden.dtype), hidden_gradient)
        return made if bias_gradient is None else (*made, bias_gradient.to(hidden.dtype))

    def work(
        self,
        made: Any,
        tangent: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        count: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Work:
        chunk_bytes = 12 * count_chunk_logits(hidden, weight, self.num_chunks)
        moved_bytes = count_bytes((tangent, hidden, weight, target, count)) + count_bytes(made)
        return work_in_chunks(
            hidden,
            weight,
            num_products=3,
            launches=_LAUNCHES * self.num_chunks,
            workspace_bytes=chunk_bytes + 4 * weight.numel(),
            moved_bytes=moved_bytes,
            bytes_per_logit=_BACKWARD_BYTES[hidden.dtype in HALF],
        )


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, in the type of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b)


def count_chunk_logits(hidden: torch.Tensor, weight: torch.Tensor, num_chunks: int) -> int:
    return -(-hidden.shape[0] // num_chunks) * weight.shape[1]


def work_in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    num_products: int,
    launches: int,
    workspace_bytes: int,
    moved_bytes: int,
    bytes_per_logit: int,
) -> Work:
    """Products of hidden and weight, and between them passes over a chunk's logits: one after another, not at the same time."""
    num_logits = hidden.shape[0] * weight.shape[1]
    return Work(
        flops=2.0 * num_products * num_logits * hidden.shape[-1],
        launches=launches,
        workspace_bytes=workspace_bytes,
        half=hidden.dtype in HALF,
        then=(Work(moved_bytes=moved_bytes + bytes_per_logit * num_logits, launches=0),),
    )
