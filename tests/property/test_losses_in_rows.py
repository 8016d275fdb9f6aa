"""Random losses, of ops that work row by row and of some that do not: whatever is cut gives the plain model's loss and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.passes.step.test_losses_in_rows import WORDS, Head, assert_same_step, cross, data, flat

from memfit.capture.inputs import Call
from memfit.passes.check import check_captured
from memfit.passes.step.losses_in_rows import slice_losses
from memfit.pipeline.capture import capture

Change = Callable[[torch.Tensor, torch.Tensor, Head], torch.Tensor]
End = Callable[[torch.Tensor, torch.Tensor, Head], torch.Tensor]
BY_ROWS: list[Change] = [
    lambda y, t, model: torch.tanh(y),
    lambda y, t, model: y * model.scale,
    lambda y, t, model: y + model.shift,
    lambda y, t, model: y - y.amax(-1, keepdim=True),
    lambda y, t, model: y / y.norm(dim=-1, keepdim=True),
    lambda y, t, model: y.masked_fill((t < 40)[..., None], 0.5),
    lambda y, t, model: y * (t.clamp(min=0)[..., None] % 3 + 1),
    lambda y, t, model: torch.where(torch.arange(WORDS) == t[..., None], y - 0.2, y),
    lambda y, t, model: y.transpose(0, 1).contiguous().transpose(0, 1),
    lambda y, t, model: y.reshape(-1, WORDS).softmax(1).view(y.shape),
    lambda y, t, model: torch.cat([y[..., :100], y[..., 100:] * 2], -1),
]
ACROSS: list[Change] = [
    lambda y, t, model: y - y.mean(1, keepdim=True),
    lambda y, t, model: y.roll(1, 0),
    lambda y, t, model: y.flip(1),
    lambda y, t, model: y.softmax(0),
    lambda y, t, model: y / y.square().sum().sqrt(),
]
ENDS: list[End] = [
    lambda y, t, model: cross(*flat(y.contiguous(), t)),
    lambda y, t, model: cross(y.transpose(1, 2), t, label_smoothing=0.2, weight=model.weights),
    lambda y, t, model: cross(y[:, 1:].reshape(-1, WORDS), t[:, :-1].reshape(-1), reduction="sum"),
    lambda y, t, model: torch.logsumexp(y, -1).square().mean(),
    lambda y, t, model: y.gather(-1, t.clamp(min=0)[..., None]).exp().sum(),
    lambda y, t, model: y.topk(3, -1)[0].sum(),
    lambda y, t, model: (y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    lambda y, t, model: (y.argmax(-1) == t).double().mean() + y.square().sum(-1).mean(),
]


def random_loss(rng: random.Random) -> Change:
    changes = rng.choices(BY_ROWS, k=rng.randint(0, 3))
    if rng.random() < 0.25:
        changes.insert(rng.randrange(len(changes) + 1), rng.choice(ACROSS))
    ends = rng.sample(ENDS, rng.choice([1, 1, 2]))

    def loss(y: torch.Tensor, t: torch.Tensor, model: Head) -> torch.Tensor:
        for change in changes:
            y = change(y, t, model)
        total: Any = sum((1 + k) * end(y, t, model) for k, end in enumerate(ends))
        return total

    return loss


def check(seed: int) -> bool:
    """Whether it was cut."""
    rng = random.Random(seed)
    loss, batch = random_loss(rng), rng.choice([1, 2, 4, 12])
    model, call = Head(loss, bias=rng.random() < 0.5).double(), Call.flatten(data(batch, 48 // batch), {})
    captured = slice_losses(capture(model, call), num_slices=rng.choice([2, 5, 8, 32]), least_fraction=0.0)
    if captured is not None:
        check_captured(captured)
        assert_same_step(captured, model, call, rtol=1e-9, atol=1e-9)
    return captured is not None


@pytest.mark.parametrize("part", range(8))
def test_what_is_cut_is_the_plain_loss(part: int) -> None:
    cut = [check(seed) for seed in range(part * 10, part * 10 + 10)]
    assert sum(cut) >= 3
