"""Batches of varying lengths: one capture for all of them, and at each the plain model's bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.runtime import guarded
from memfit.runtime.graph_stepper import _COMPARED_SIZES

NO_LIMIT = 2**50
WORDS = 11


class Reader(nn.Module):
    """A small language model that returns its loss beside its logits."""

    def __init__(self, width: int = 8, long: int = 100) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(128, width)
        self.into, self.drop, self.head = nn.Linear(width, 3 * width), nn.Dropout(0.1), nn.Linear(width, WORDS)
        self.long, self.gain = long, 1.0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length))
        q, k, v = self.into(x).chunk(3, dim=-1)
        x = self.drop(functional.scaled_dot_product_attention(q, k, v, is_causal=True)) / math.sqrt(length) * self.gain
        if length > self.long:
            x = x.tanh()
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def read(rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rows + length)
    tokens = torch.randint(0, WORDS, (rows, length), generator=generator)
    return {"tokens": tokens, "labels": tokens.clone()}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was captured: "open" with sizes left open, "as it is"."""
    found: list[str] = []
    capture = guarded.capture_step

    def counted(local: Any, tensors: Any = (), varying: Any = None) -> Any:
        found.append("open" if varying else "as it is")
        return capture(local, tensors, varying)

    monkeypatch.setattr(guarded, "capture_step", counted)
    return found


def compare(plain: nn.Module, fitted: Any, batch: dict[str, torch.Tensor], change: Callable[[nn.Module], None] | None = None) -> None:
    """Loss, logits, gradients and random stream are the plain model's."""
    results = []
    for model in (plain, fitted):
        if change is not None:
            change(model)
        torch.manual_seed(5)
        model.zero_grad()
        out = model(**batch)
        out["loss"].backward()
        drawn = torch.rand(2)
        results.append([out["loss"].detach(), out["logits"].detach().clone(), drawn, *(p.grad for p in model.parameters())])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


def fit(sizes: Sequence[int] = (4, 20), **options: Any) -> tuple[nn.Module, Any]:
    plain = Reader()
    return plain, memfit.fit(copy.deepcopy(plain), read(*sizes), **{"budget": NO_LIMIT, "planner": "keep_all", **options})


def test_one_capture_serves_all_lengths(captures: list[str]) -> None:
    plain, fitted = fit()
    for rows, length in ((4, 20), (4, 24), (4, 7), (4, 33), (3, 21), (4, 3), (2, 24), (4, 20), (4, 7)):
        compare(plain, fitted, read(rows, length))
    assert captures == ["as it is", "open"]


def test_a_short_last_batch_alone_is_a_varying_size(captures: list[str]) -> None:
    plain, fitted = fit()
    for rows in (4, 3, 2, 5):
        compare(plain, fitted, read(rows, 20))
    assert captures == ["as it is", "open"]


def test_a_size_of_one_is_captured_as_it_is(captures: list[str]) -> None:
    plain, fitted = fit()
    for rows, length in ((1, 20), (4, 24), (1, 24), (4, 25)):
        compare(plain, fitted, read(rows, length))
    assert captures == ["as it is", "as it is", "open", "as it is"]


def test_a_branch_on_the_length_is_guarded(captures: list[str]) -> None:
    plain = Reader(long=30)
    fitted = memfit.fit(copy.deepcopy(plain), read(4, 20), budget=NO_LIMIT, planner="keep_all")
    for length in (20, 24, 30, 31, 40, 25, 50, 29):
        compare(plain, fitted, read(4, length))
    assert captures == ["as it is", "open", "open"]


def test_what_changes_is_captured_again(captures: list[str]) -> None:
    plain, fitted = fit()
    for length in (20, 24, 25):
        compare(plain, fitted, read(4, length))

    def louder(model: nn.Module) -> None:
        model.gain = 2.0

    for length in (26, 27, 20):
        compare(plain, fitted, read(4, length), louder)
    assert captures == ["as it is", "open", "open"]


def test_gradients_are_accumulated_over_lengths() -> None:
    plain, fitted = fit()
    for model in (plain, fitted):
        torch.manual_seed(5)
        for length in (20, 24, 9, 24):
            model(**read(4, length))["loss"].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), fitted.parameters(), strict=True) if a.grad is not None)


def test_the_callers_tensors_are_left_as_they_are() -> None:
    _, fitted = fit()
    for length in (20, 24, 25):
        batch = read(4, length)
        fitted(**batch)["loss"].backward()
        assert all(not vars(t) for t in batch.values())


def test_the_first_sizes_are_compared_with_the_plain_model() -> None:
    _, fitted = fit()
    sentences = []
    for length in range(20, 28):
        fitted(**read(4, length))["loss"].backward()
        sentences.append(fitted.report().check)
    compared = [s.startswith("outputs, gradients and buffers identical") for s in sentences]
    assert compared == [True] * (1 + _COMPARED_SIZES) + [False] * (7 - _COMPARED_SIZES)
    assert any("same trace" in note for note in fitted.report().notes)


def test_every_size_is_compared_where_that_is_asked_for() -> None:
    _, fitted = fit(check=True)
    for length in range(20, 27):
        fitted(**read(4, length))["loss"].backward()
        assert "bit for bit" in fitted.report().check


def test_what_cannot_be_left_open_is_captured_as_it_is(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise memfit.Unsupported("not today")

    monkeypatch.setattr("memfit.pipeline.open_sizes.OpenGraph", refuse)
    plain, fitted = fit()
    for length in (20, 24, 25, 26, 27, 24):
        compare(plain, fitted, read(4, length))
    assert captures == ["as it is", "open", "as it is", "open", "as it is", "as it is", "as it is"]


def test_outputs_beside_the_loss_have_the_size_of_their_call() -> None:
    plain, fitted = fit(keep_outputs=False)
    for length in (20, 24, 9, 33):
        compare(plain, fitted, read(4, length))


def test_another_planner_is_asked_for_each_size(captures: list[str]) -> None:
    plain, fitted = fit(planner="sqrt_segments")
    for length in (20, 24, 25, 26):
        compare(plain, fitted, read(4, length))
        assert fitted.report().planner == "sqrt_segments"
    assert captures == ["as it is", "open"]
