"""Models with their loss in forms that libraries write, near the least budget: bytes as predicted, loss and gradients the plain model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, twin
from tests.unit.passes.step.test_losses_in_rows import Loss, cross, flat, gathered, masked, old_shift, with_accuracy
from torch import nn

import memfit

WIDTH, WORDS, BATCH, LENGTH = 32, 211, 4, 256  # words as `old_shift` knows them
FORMS: dict[str, Loss] = {
    "label smoothing": lambda y, t, model: cross(*flat(y, t), label_smoothing=0.1),
    "class weights": lambda y, t, model: cross(*flat(y, t), weight=model.weights),
    "z-loss": lambda y, t, model: cross(*flat(y, t)) + 1e-2 * torch.logsumexp(flat(y, t)[0], -1).pow(2).mean(),
    "shifted and copied": old_shift,
    "masked": masked,
    "accuracy": with_accuracy,
    "classes in the middle": lambda y, t, model: cross(y.transpose(1, 2), t),
    "gathered": gathered,
}


class Speaker(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), loss
        self.register_buffer("weights", torch.linspace(0.5, 1.5, WORDS))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.embed(tokens))), labels, self)


def least_of(model: nn.Module, example: Any) -> int:
    with pytest.raises(memfit.InfeasibleBudget) as refusal:
        memfit.fit(copy.deepcopy(model), example, budget=1, engine="eager", time_limit_s=5)
    assert refusal.value.minimum_bytes is not None
    return refusal.value.minimum_bytes


def loss_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_near_the_least_budget_holds_what_was_predicted(form: str) -> None:
    torch.manual_seed(0)
    plain = Speaker(FORMS[form])
    model, (tokens, labels) = twin(plain), torch.randint(0, WORDS, (2, BATCH, LENGTH))
    labels[:, :9] = -100
    free: Any = memfit.fit(copy.deepcopy(plain), (tokens, labels), budget=NO_LIMIT, engine="eager", planner="keep_all")
    least = least_of(plain, (tokens, labels))
    assert least < 0.3 * free.report().keep_all_peak_bytes
    budget = int(1.15 * least)
    fitted: Any = memfit.fit(model, (tokens, labels), budget=budget, engine="eager", time_limit_s=10)
    for _ in range(3):
        model.zero_grad()
        found = loss_of(fitted(tokens, labels))
        found.backward()
    report = fitted.report()
    assert any("losses-in-rows" in note for note in report.notes)
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget
    assert abs(fitted.plan.timeline.peak_bytes - report.measured_peak_bytes) <= 0.02 * budget
    expected = loss_of(plain(tokens, labels))
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    scale = max(float(q.grad.abs().max()) for q in plain.parameters())  # type: ignore[union-attr]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-5 * scale)
