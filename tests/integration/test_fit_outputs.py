"""A model that returns its loss beside logits: what the budget does not hold is left out, and computed when it is read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.storage_meter import AllocationMeter
from tests.training import held_bytes, same, twin
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.cli import main

WORDS = 700


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    states: Tensor


class Language(nn.Module):
    """As libraries write it: labels among the inputs, the loss inside, logits and a state beside it."""

    def __init__(self, *, bias: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, 16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.head = nn.Linear(16, WORDS, bias=bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        states = self.body(self.embed(tokens))
        logits = self.head(states)
        loss = None if labels is None else functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))
        return Output(loss, logits, states)


def example(seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def least(model: nn.Module, **options: Any) -> int:
    with pytest.raises(memfit.InfeasibleBudget) as refusal:
        memfit.fit(model, example(), budget=1, **options)
    assert refusal.value.minimum_bytes is not None
    return refusal.value.minimum_bytes


def fit_below(model: nn.Module, **options: Any) -> Any:
    """Inside a budget that holds no logits."""
    return memfit.fit(model, example(), budget=int(0.9 * least(twin(model), keep_outputs=True)), time_limit_s=3, **options)


def step(model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(**example(seed))
    output.loss.backward()
    return output


def close(ours: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if a.grad is None or b.grad is None:
            assert a.grad is b.grad
            continue
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6 * float(b.grad.abs().max()), msg=lambda m, name=name: f"{name} {m}")


@pytest.mark.parametrize("bias", [False, True])
def test_a_budget_that_holds_no_logits_is_met(bias: bool) -> None:
    model = Language(bias=bias)
    plain = twin(model)
    whole = memfit.fit(twin(model), example(), budget="1GiB", planner="keep_all").report().keep_all_peak_bytes
    assert least(model) < 0.4 * whole < least(model, keep_outputs=True)
    fitted = fit_below(model)
    step(fitted)  # compared with the plain model, in its memory
    model.zero_grad()
    held = held_bytes(model, None, *example().values())
    with AllocationMeter() as meter:
        step(fitted)
    assert held + meter.peak <= fitted.report().budget_bytes
    ours, theirs = step(fitted), step(plain)
    close(model, plain)
    assert same(ours.logits.detach() + 0, theirs.logits)  # with the dropout of its step
    assert same(ours.states.detach() + 0, theirs.states)
    assert any("left out" in note for note in fitted.report().notes)


def test_where_the_budget_holds_them_all_outputs_are_produced() -> None:
    model = Language()
    plain = twin(model)
    fitted = memfit.fit(model, example(), budget="1GiB")
    ours, theirs = step(fitted), step(plain)
    assert type(ours.logits) is Tensor
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert same(ours.logits.detach(), theirs.logits.detach())
    left: Any = memfit.fit(twin(plain), example(), budget="1GiB", keep_outputs=False)
    assert type(step(left).logits) is not Tensor


def test_reading_leaves_random_numbers_and_gradients_alone() -> None:
    model = Language()
    fitted = fit_below(model)
    output = step(fitted)
    before = torch.get_rng_state(), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert output.logits.argmax(-1).shape == (8, 16)
    assert torch.equal(before[0], torch.get_rng_state())
    assert same(before[1], [p.grad for p in model.parameters()])


def test_read_too_late_is_refused_by_name() -> None:
    model = Language()
    fitted = fit_below(model)
    output = step(fitted)
    early = output.states.detach().sum()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(memfit.Unsupported, match=r"embed.weight has changed since: read it before optimizer.step\(\)"):
        output.logits.argmax(-1)
    assert torch.equal(output.states.detach().sum(), early)


def test_a_gradient_through_logits_is_refused_or_right() -> None:
    def loss_of(model: Any) -> Tensor:
        torch.manual_seed(0)
        output = model(**example())
        return output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()

    model = Language()
    plain = twin(model)
    with pytest.raises(memfit.Unsupported, match="keep_outputs=True"):
        loss_of(fit_below(model)).backward()
    model.zero_grad()
    loss_of(memfit.fit(model, example(), budget="1GiB", keep_outputs=True)).backward()
    loss_of(plain).backward()
    close(model, plain)


def test_without_gradients_and_without_labels_nothing_is_left_out() -> None:
    model = Language(dropout=0.0)
    fitted = fit_below(model)
    with torch.no_grad():
        assert type(fitted(**example()).logits) is Tensor
    assert fitted.eval()(example()["tokens"]).loss is None


class Cache:
    """As libraries hold keys and values: no container that torch knows."""

    def __init__(self, *states: Tensor) -> None:
        self.layers = [{"keys": s} for s in states]


@dataclass
class Wide:
    loss: Tensor | None
    logits: Tensor
    mask: Tensor
    cache: Cache


class Dropping(Language):
    """Asks a random number whether a layer is left out, as BART, OPT and Whisper do: Dynamo refuses it."""

    layerdrop = 0.0

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Wide:  # type: ignore[override]
        if torch.rand([]) < self.layerdrop:
            tokens = tokens.flip(1)
        found = super().forward(tokens, labels)
        return Wide(found.loss, found.logits, tokens > 3, Cache(found.states, tokens))


@pytest.mark.parametrize("fraction", [0.6, 2.0])
def test_outputs_of_memfits_own_trace_are_left_out_too(fraction: float) -> None:
    model = Dropping()
    plain = twin(model)
    fitted: Any = memfit.fit(model, example(), budget=int(fraction * least(twin(model), keep_outputs=True)), time_limit_s=3)
    for seed in range(2):
        ours, theirs = step(fitted, seed), step(plain, seed)
        close(model, plain)
        assert (type(ours.logits) is Tensor) == (fraction > 1)
        assert same(ours.logits.detach() + 0, theirs.logits)
        assert same(ours.mask, theirs.mask)
    assert "identical" in fitted.report().check or fraction < 1
    assert "equal" in fitted.report().check or fraction > 1


def test_an_object_that_holds_tensors_is_computed_when_it_is_read() -> None:
    model = Dropping()
    plain = twin(model)
    fitted: Any = memfit.fit(model, example(), budget="1GiB")
    ours, theirs = step(fitted), step(plain)
    assert isinstance(ours.cache, Cache)
    assert "computed when it is read" in repr(ours.cache)
    assert same(ours.cache.layers[0]["keys"].detach() + 0, theirs.cache.layers[0]["keys"].detach())
    assert same(ours.cache.layers[1]["keys"], theirs.cache.layers[1]["keys"])
    with pytest.raises(memfit.Unsupported, match="keep_outputs=True"):
        (fitted(**example()).cache.layers[0]["keys"].sum()).backward()


class Chatty(Language):
    """Changes a buffer that it reads, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        found = super().forward(tokens, labels)
        assert found.loss is not None
        self.norm(found.states.detach().flatten(0, 1))
        return found


def test_buffers_move_once_however_often_outputs_are_read() -> None:
    model = Chatty()
    plain = twin(model)
    fitted = fit_below(model)
    for seed in range(3):
        ours, theirs = step(fitted, seed), step(plain, seed)
        assert same(ours.logits.detach() + 0, theirs.logits)
        close(model, plain)
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))


def test_memfit_run_trains_a_model_with_its_loss_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "from tests.integration.test_fit_outputs import Language, example\n"
        "def build():\n    return Language(), example()\n"
        "def without():\n    return Language(), {'tokens': example()['tokens']}\n"
    )
    monkeypatch.chdir(tmp_path)
    for factory, code, said in (("build", 0, "trained    2 steps"), ("without", 1, "the model must give a loss")):
        monkeypatch.setattr(sys, "argv", ["memfit", "run", f"net.py:{factory}", "--budget", "8MiB", "--steps", "2", "--time-limit", "2"])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert end.value.code in ((0, None) if code == 0 else (code,))
        assert said in printed.out + printed.err
