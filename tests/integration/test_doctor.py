"""`memfit.doctor` against `memfit.fit`: the minimum is that of the refusal, what it names lowers it, and what it reached trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.pipeline.doctor.held import join_numbers

WORDS = 3000
Step = tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]


def tower() -> Step:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(64, 10)), (torch.randn(256, 64),), (torch.randint(0, 10, (256,)),)


def wide_head() -> Step:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, WORDS)), (torch.randn(128, 32),), (torch.randint(0, WORDS, (128,)),)


def convolutions() -> Step:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 8 * 8, 10))
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), head)
    return net, (torch.randn(16, 3, 16, 16),), (torch.randint(0, 10, (16,)),)


def ask(step: Step, **options: Any) -> memfit.report.diagnosis.Diagnosis:  # type: ignore[name-defined]
    model, inputs, targets = step
    options = {"optimizer": torch.optim.AdamW(model.parameters()), "time_limit_s": 0.1, **options}
    return memfit.doctor(model, inputs, loss_fn=functional.cross_entropy, example_targets=targets, **options)


def fit(step: Step, budget: int, **options: Any) -> Any:
    model, inputs, targets = step
    options = {"optimizer": torch.optim.AdamW(model.parameters()), "time_limit_s": 2, "check": False, **options}
    return memfit.fit(model, inputs, loss_fn=functional.cross_entropy, example_targets=targets, budget=budget, **options)


def refusal(step: Step, **options: Any) -> memfit.InfeasibleBudget:
    with pytest.raises(memfit.InfeasibleBudget) as raised:
        fit(step, 1000, **options)
    return raised.value


@pytest.mark.parametrize(
    ("make", "allow"),
    [(tower, ("recompute",)), (wide_head, ("recompute", "variants")), (convolutions, ("recompute", "variants"))],
    ids=["plain", "variants", "slices"],
)
def test_the_minimum_is_what_the_refusal_says(make: Callable[[], Step], allow: tuple[str, ...]) -> None:
    step = make()
    said = refusal(step, allow=allow)
    found = ask(step, allow=allow)
    assert found.minimum_bytes == said.minimum_bytes
    assert found.held_at in str(said)
    assert sum(row.size_bytes for row in found.held) == found.minimum_bytes
    assert "memfit doctor" in str(said)


def test_the_pass_it_names_lowers_the_minimum_of_fit() -> None:
    step = wide_head()
    without = refusal(step, allow=("recompute",)).minimum_bytes or 0
    row = next(row for row in ask(step, allow=("recompute",)).passes if row.name == "chunked-loss")
    assert row.after_bytes is not None
    assert row.after_bytes < row.before_bytes == without
    assert "not allowed" in row.note
    found = ask(step)
    assert found.form == "chunked-loss"
    between = (found.minimum_bytes + without) // 2
    with pytest.raises(memfit.InfeasibleBudget):
        fit(step, between, allow=("recompute",))
    assert fit(step, between).report().predicted_peak_bytes <= between


def test_what_it_reached_can_be_trained_in() -> None:
    step = tower()
    refusal(step)  # measures
    found = ask(step, budget="1GiB", time_limit_s=1)
    assert found.verdict == "FITS AS IT IS"
    assert found.reached_bytes is not None
    assert found.minimum_bytes <= found.reached_bytes < found.keep_all_bytes
    assert [found.reached_bytes < p.budget_bytes < found.keep_all_bytes for p in found.larger] == [True, True]
    assert found.reached_overhead_fraction is not None
    assert all(p.overhead_fraction <= found.reached_overhead_fraction for p in found.larger)
    fitted = fit(step, found.reached_bytes)
    model, inputs, targets = step
    fitted(*inputs, *targets).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rows_are_storages_alike() -> None:
    model, (x,), (y,) = tower()
    found = ask((model, (x[:8],), (y[:8],)))  # held by the optimizer's step, when all gradients are there
    assert ("gradient", 2, 64 * 256 * 4, "of 0..1.2.weight", "0..1.2") in {
        (r.kind, r.count, r.each_bytes, r.name, r.where) for r in found.held
    }


def test_half_the_rows_have_the_minimum_that_is_said() -> None:
    step = convolutions()
    model, (x,), (y,) = step
    row = next(r for r in ask(step).outside if "rows instead of" in r.what)
    assert row.what == "8 rows instead of 16"
    assert row.after_bytes == ask((model, (x[:8].clone(),), (y[:8].clone(),))).minimum_bytes


def test_another_optimizer_has_the_minimum_that_is_said() -> None:
    step = wide_head()
    rows = {row.what: row.after_bytes for row in ask(step).outside}
    assert rows["SGD"] == ask(step, optimizer=torch.optim.SGD(step[0].parameters(), lr=1e-3)).minimum_bytes


class Language(nn.Module):
    """Gives its loss and, beside it, logits."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(self.embed(tokens))
        return functional.cross_entropy(logits, tokens), logits


@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "own trace"])
def test_outputs_beside_the_loss_are_counted(breaks: bool) -> None:
    model, tokens = Language(breaks=breaks), torch.randint(0, WORDS, (64,))

    def ask_for(keep: bool | None) -> Any:
        return memfit.doctor(model, (tokens,), keep_outputs=keep, time_limit_s=0.2)

    minimum = {}
    for keep in (None, False, True):
        with pytest.raises(memfit.InfeasibleBudget) as raised:
            memfit.fit(model, (tokens,), budget=1000, keep_outputs=keep, time_limit_s=2)
        minimum[keep] = raised.value.minimum_bytes
    assert {keep: ask_for(keep).minimum_bytes for keep in minimum} == minimum
    assert minimum[True] > minimum[None] == minimum[False]
    found = ask_for(None)
    row = found.passes[0]
    assert row.name == "keep_outputs=False"
    assert row.before_bytes == found.as_it_is_bytes
    assert row.after_bytes is not None
    assert row.before_bytes - row.after_bytes >= 64 * WORDS * 4


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.line(x).sum()


def test_a_refusal_of_dynamo_is_said_with_its_line() -> None:
    found = memfit.doctor(Broken(), (torch.randn(2, 4),), time_limit_s=0.1)
    line = Broken.forward.__code__.co_firstlineno + 1
    assert len(found.refused) == 1
    assert f"(test_doctor.py:{line})" in found.refused[0]
    assert "own trace" in found.refused[0]
    assert memfit.doctor(nn.Linear(4, 1), (torch.randn(2, 4),), time_limit_s=0.1).refused == ()


def test_gradients_that_are_there_count_as_in_fit() -> None:
    step = wide_head()
    before = ask(step).minimum_bytes
    functional.cross_entropy(step[0](*step[1]), *step[2]).backward()
    step[0][0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW([p for p in step[0].parameters() if p.requires_grad])
    said = refusal(step, optimizer=optimizer)
    found = ask(step, optimizer=optimizer)
    assert found.minimum_bytes == said.minimum_bytes != before
    assert found.beside_bytes == 32 * 33 * 4  # left on what was frozen
    assert sum(row.size_bytes for row in found.held) + found.beside_bytes == found.minimum_bytes


def test_a_fitted_model_is_refused_and_one_that_trains_nothing_is_not() -> None:
    fitted = memfit.fit(nn.Linear(4, 1), (torch.randn(2, 4),), budget="1MiB", check=False)
    with pytest.raises(memfit.BadInput, match="fitted already"):
        memfit.doctor(fitted, (torch.randn(2, 4),))
    found = memfit.doctor(nn.Linear(4, 1).requires_grad_(False), (torch.randn(2, 4),), time_limit_s=0.1)
    assert found.fixed["gradient"] == 0
    assert found.minimum_bytes > 0


def test_nothing_of_the_users_is_touched() -> None:
    step = convolutions()
    optimizer, before, random = torch.optim.AdamW(step[0].parameters()), [p.clone() for p in step[0].parameters()], torch.get_rng_state()
    ask(step, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(step[0].parameters(), before, strict=True))


def test_paths_that_differ_in_a_number_are_one() -> None:
    assert join_numbers(["layers.0.mlp, net.py:3", "layers.11.mlp, net.py:3"]) == "layers.0..11.mlp, net.py:3"
    assert join_numbers(["a.1.b.2, n.py:5"]) == "a.1.b.2, n.py:5"
    assert join_numbers(["a.1.b.2.c", "a.1.b.3.c"]) == ""
    assert join_numbers(["embed, net.py:3", "head, net.py:3"]) == ""
