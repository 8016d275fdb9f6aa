"""A fitted model trains exactly as the plain one: losses, gradients, weights, buffers and random stream, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, Tied, batch, deep, fit_tight, recomputes, same, train, twin
from torch import nn
from torch.nn import functional

import memfit


def test_dropout_and_batch_norm_over_several_steps() -> None:
    plain = deep()
    model = twin(plain)
    batches = [batch(seed=k) for k in range(4)]
    fitted = fit_tight(model, (batches[0][0],))
    assert recomputes(fitted)
    assert same(train(fitted, batches), train(plain, batches))


def test_loss_inside_the_plan() -> None:
    plain = deep()
    model = twin(plain)
    x, y = batch()
    fitted = fit_tight(model, (x,), loss_fn=functional.cross_entropy, example_targets=(y,))
    assert recomputes(fitted)
    ours = train(fitted, [((x, y),)] * 3, loss_fn=None)
    assert same(ours, train(plain, [(x, y)] * 3))


def test_tied_weights_with_attention_and_dropout() -> None:
    plain = Tied()
    model = twin(plain)
    tokens = torch.randint(0, 11, (4, 10))

    def loss_fn(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    fitted = fit_tight(model, (tokens,))
    assert recomputes(fitted)
    assert same(train(fitted, [(tokens,)] * 3, loss_fn=loss_fn), train(plain, [(tokens,)] * 3, loss_fn=loss_fn))
    assert fitted.head.weight is fitted.embed.weight


def test_autocast_bfloat16() -> None:
    plain = deep()
    model = twin(plain)
    x, y = batch()
    outcomes = []
    for which in ("fitted", "plain"):
        with torch.autocast("cpu", torch.bfloat16):
            trained = fit_tight(model, (x,)) if which == "fitted" else plain
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        seen = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                output = trained(x)
                loss = functional.cross_entropy(output, y)
            loss.backward()
            seen.append((output.detach(), loss.detach(), [p.grad.clone() for p in trained.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(seen)
    assert outcomes[0][0][0].dtype is torch.bfloat16
    assert same(*outcomes)


def test_convolutions_in_channels_last() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(1)
    ).to(memory_format=torch.channels_last)
    model = twin(plain)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    batches = [(x, torch.randint(0, 512, (4,)))] * 2
    fitted = fit_tight(model, (x,), fraction=1.0)
    assert same(train(fitted, batches), train(plain, batches))


def test_random_ops_other_than_dropout_are_replayed() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                keep = torch.empty(x.shape[0], 1).bernoulli_(0.8)  # drop path
                x = x + keep * torch.tanh(layer(x)) + 0.1 * torch.rand_like(x) * torch.randn_like(x)
                x = x * torch.rand(16)
            return x

    plain = Noisy()
    model = twin(plain)
    x, _ = batch()
    fitted = fit_tight(model, (x,), fraction=0.8)
    assert recomputes(fitted)
    assert same(train(fitted, [(x,)] * 2, loss_fn=torch.mean), train(plain, [(x,)] * 2, loss_fn=torch.mean))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_with_dropout_between(kind: Any) -> None:
    torch.manual_seed(0)
    plain = kind(4, 5, num_layers=2, dropout=0.5, bidirectional=True, batch_first=True)
    model = twin(plain)
    x = torch.randn(2, 3, 4)

    def loss_fn(output: Any) -> torch.Tensor:
        return output[0].square().mean()

    fitted = memfit.fit(model, (x,), budget=NO_LIMIT, planner="keep_all")
    ours, theirs = train(fitted, [(x,)] * 2, loss_fn=loss_fn), train(plain, [(x,)] * 2, loss_fn=loss_fn)
    torch.testing.assert_close(ours["gradients"], theirs["gradients"])  # the plain LSTM is one oneDNN call, rounded otherwise
    assert same(ours["random"], theirs["random"])


def test_batch_norm_statistics_are_updated_once_however_often_it_is_recomputed() -> None:
    model = deep()
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.5)
    norms = [i for i, op in enumerate(fitted._memfit.latest.ready.captured.graph.ops) if "batch_norm" in op.name]
    runs = [step.op for step in fitted.plan.schedule.steps if hasattr(step, "op")]
    assert any(runs.count(i) > 1 for i in norms)
    functional.cross_entropy(fitted(x), y).backward()
    assert [int(b) for name, b in fitted.named_buffers() if "num_batches" in name] == [1] * 4


def test_a_buffer_that_the_model_reads_and_then_changes() -> None:
    """Recomputation must see the value from before the change."""

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
            self.register_buffer("scale", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale.clone()
            for layer in self.layers:
                x = torch.sin(layer(x) * scale)
            with torch.no_grad():
                self.scale.mul_(0.5).add_(x.abs().mean(0))
            return x

    plain = Moving()
    model = twin(plain)
    x, _ = batch()
    fitted = fit_tight(model, (x,), fraction=0.8)
    assert same(train(fitted, [(x,)] * 3, loss_fn=torch.mean), train(plain, [(x,)] * 3, loss_fn=torch.mean))


def test_the_check_of_the_first_step_says_so() -> None:
    x, y = batch()
    fitted = memfit.fit(deep(), (x,), budget="1GiB", planner="greedy")
    functional.cross_entropy(fitted(x), y).backward()
    assert "bit for bit" in fitted.report().check


def test_the_check_leaves_no_trace() -> None:
    plain = deep()
    model = twin(plain)
    x, y = batch()
    fitted = memfit.fit(model, (x,), budget="1GiB", planner="greedy", check=True)
    assert same(train(fitted, [(x, y)] * 2), train(plain, [(x, y)] * 2))


def test_a_wrong_plan_is_caught_by_the_check() -> None:
    x, y = batch()
    fitted: Any = memfit.fit(deep(dropout=0.0), (x,), budget="1GiB", planner="greedy", check=True)
    ready = fitted._memfit.latest.ready
    right = ready.program.forward

    def wrong(*args: Any) -> Any:
        outputs, mutations, saved = right(*args)
        return outputs, mutations, [v * 2 if v.is_floating_point() and v.ndim == 2 else v for v in saved]

    object.__setattr__(ready.program, "forward", wrong)
    with pytest.raises(memfit.MemfitError, match="differs from the plain model"):
        functional.cross_entropy(fitted(x), y).backward()
