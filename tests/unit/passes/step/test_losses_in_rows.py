"""Losses of every form in slices of their rows: the plain model's loss and gradients, nothing as wide as the logits, and what is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.costs import uniform_costs
from memfit.passes.check import check_captured
from memfit.passes.interface import Context
from memfit.passes.slicing.sliced_call import Sliced
from memfit.passes.step.chunked_loss import chunk_loss
from memfit.passes.step.losses_in_rows import LOSSES_IN_ROWS, slice_losses
from memfit.pipeline.capture import capture
from memfit.planning import plan
from memfit.profile.roofline import roofline
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate

WIDTH, WORDS = 8, 211
cross = functional.cross_entropy
Loss = Callable[[torch.Tensor, torch.Tensor, "Head"], Any]


class Head(nn.Module):
    """A language model of one layer: `loss` makes of (batch, length, words) and (batch, length) what it returns."""

    def __init__(self, loss: Loss, *, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("shift", torch.linspace(-1, 1, WORDS)[None])
        self.register_buffer("weights", torch.linspace(0.5, 1.5, WORDS))
        self.loss = loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.embed(tokens))), labels, self)


def flat(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.view(-1, logits.shape[-1]), labels.view(-1)


def old_shift(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return cross(shifted.view(-1, WORDS), labels[..., 1:].contiguous().view(-1))


def masked(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    rows, words = flat(logits, labels)
    return (cross(rows, words, reduction="none") * (words > 20)).sum() / 7


def with_accuracy(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> Any:
    return cross(*flat(logits, labels)), (logits.argmax(-1) == labels).float().mean()


def one_hot(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    rows, words = flat(logits, labels)
    soft = torch.zeros_like(rows).scatter_(1, words.clamp(min=0)[:, None], 0.9) + 0.1 / WORDS
    return -(soft * rows.log_softmax(1)).sum(1).mean()


def gathered(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    rows, words = flat(logits, labels)
    return (torch.logsumexp(rows, -1) - rows.gather(1, words.clamp(min=0)[:, None])[:, 0]).mean()


def by_hand(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    rows, words = flat(logits, labels)
    largest = rows.max(-1, keepdim=True)[0].detach()
    total = (rows - largest).exp().sum(-1).log() + largest[:, 0]
    return (total - rows.gather(1, words.clamp(min=0)[:, None])[:, 0]).mean()


def indexed(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    """Labels of -100 count from the end."""
    rows, words = flat(logits, labels)
    return -rows.log_softmax(-1)[torch.arange(len(rows)), words].mean()


def indexed_margin(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    rows, words = flat(logits * 1.0, labels.clamp(min=0))
    rows[torch.arange(len(rows)), words] -= 0.3
    return cross(rows, words)


def focal(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    losses = cross(*flat(logits, labels), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def margin(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
    rows, words = flat(logits.tanh(), labels.clamp(min=0))
    chosen = torch.zeros_like(rows).scatter_(1, words[:, None], 1.0)
    return cross(5 * (rows - 0.2 * chosen), words)


FORMS: dict[str, Loss] = {
    "label smoothing": lambda y, t, model: cross(*flat(y, t), label_smoothing=0.1),
    "class weights": lambda y, t, model: cross(*flat(y, t), weight=model.weights),
    "class weights smoothed": lambda y, t, model: cross(*flat(y, t), weight=model.weights, label_smoothing=0.2),
    "class weights summed": lambda y, t, model: cross(*flat(y, t), weight=model.weights, reduction="sum"),
    "shifted and copied": old_shift,
    "a loss for each row, masked": masked,
    "z-loss": lambda y, t, model: cross(*flat(y, t)) + 1e-2 * torch.logsumexp(flat(y, t)[0], -1).pow(2).mean(),
    "accuracy inside": with_accuracy,
    "classes in the middle": lambda y, t, model: cross(y.transpose(1, 2), t),
    "classes in the middle, smoothed": lambda y, t, model: cross(y.transpose(1, 2), t, label_smoothing=0.1, weight=model.weights),
    "soft targets": one_hot,
    "probabilities": lambda y, t, model: cross(flat(y, t)[0], functional.one_hot(t.view(-1).clamp(min=0), WORDS).to(y.dtype)),
    "gather": gathered,
    "by hand": by_hand,
    "added buffer": lambda y, t, model: cross(*flat(y + model.shift, t)),
    "learned temperature": lambda y, t, model: cross(*flat(y / model.scale, t)),
    "indexed": indexed,
    "indexed margin": indexed_margin,
    "focal": focal,
    "margin": margin,
    "several": lambda y, t, model: cross(*flat(y, t), label_smoothing=0.1) + 0.1 * masked(y, t, model),
}


def data(batch: int = 4, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, WORDS, (2, batch, length))
    labels[:, :2] = -100
    return tokens, labels


def loss_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def run_step(captured: Captured, model: nn.Module, call: Call) -> Any:
    """The outputs, after backward."""
    model.zero_grad()
    chosen = plan(captured.graph, planner="keep_all").require_plan()
    program = generate(captured, chosen.schedule)
    ready = Ready(
        captured=captured, costs=uniform_costs(captured.graph), plan=chosen, program=program, keep_all_peak_bytes=0, base_time_ns=0
    )
    output = run(Session(ready, (*model.parameters(), *model.buffers(), *call.tensors), trial=False, replan=lambda _: None))
    loss_of(output).backward()
    return output


def assert_same_step(captured: Captured, model: nn.Module, call: Call, **tolerance: float) -> float:
    """The largest gradient, which differences are held against."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    expected = twin(*call.tensors)
    loss_of(expected).backward()
    found = run_step(captured, model, call)
    torch.testing.assert_close(found, expected, **tolerance)
    scale = max(float(p.grad.abs().max()) for p in twin.parameters() if p.grad is not None)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=tolerance["atol"] * max(scale, 1e-6))  # some are truly zero
    return scale


def widest(captured: Captured) -> int:
    """Of what ops make: places, but of views and of constants that lie in one place."""
    made = (t for op in captured.graph.ops for t in op.outputs)
    return max(captured.graph.size_of(t) // s.element_size() for t in made if (s := captured.samples[t]) is not None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [4, 1])
def test_a_loss_in_slices_is_the_plain_one(form: str, batch: int) -> None:
    tokens, labels = data(batch, 48 // batch)
    model, call = Head(FORMS[form], bias=batch == 1).double(), Call.flatten((tokens, labels), {})
    whole = capture(model, call)
    assert widest(whole) >= 47 * WORDS
    assert chunk_loss(whole, least_fraction=0.0) is None
    captured = slice_losses(whole, least_fraction=0.0)
    assert captured is not None
    check_captured(captured)
    names = [op.name.split()[0] for op in captured.graph.ops]
    assert names.count("memfit.scores_forward") == names.count("memfit.scores_backward") == 1
    assert widest(captured) <= max(WORDS * WIDTH, 48 * WIDTH), "something as wide as the logits is left"
    assert assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10) > 1e-6
    assert len(roofline(captured, "cpu").op_time_ns) == len(captured.graph.ops)


@pytest.mark.parametrize("form", ["classes in the middle", "accuracy inside", "by hand", "shifted and copied"])
@pytest.mark.parametrize("batch", [2, 3, 12])
def test_a_few_sequences_are_cut_in_themselves(form: str, batch: int) -> None:
    model, call = Head(FORMS[form]).double(), Call.flatten(data(batch, 48 // batch), {})
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    assert num_slices(captured) >= 6
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [1, 2])
def test_sums_over_a_sequence_are_added_up_where_they_belong(batch: int) -> None:
    def sums(logits: torch.Tensor, labels: torch.Tensor, model: Head) -> torch.Tensor:
        return cross(logits.transpose(1, 2), labels) + 1e-3 * logits.sum(1).square().mean()

    model, call = Head(sums).double(), Call.flatten(data(batch, 48 // batch), {})
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    assert num_slices(captured) >= 8
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["label smoothing", "class weights", "z-loss", "margin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_slices_in_shorter_numbers(form: str, dtype: torch.dtype) -> None:
    model, call = Head(FORMS[form], bias=True).to(dtype), Call.flatten(data(), {})
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    near = 1e-5 if dtype is torch.float32 else 3e-2
    assert_same_step(captured, model, call, rtol=near, atol=near)


def test_a_mean_in_half_precision_stays_as_it_is() -> None:
    """The sum of many losses would be infinite."""
    model, call = Head(FORMS["class weights"]).half(), Call.flatten(data(), {})
    assert slice_losses(capture(model, call), least_fraction=0.0) is None


@pytest.mark.parametrize("form", ["label smoothing", "classes in the middle", "margin"])
def test_a_loss_in_slices_in_autocast(form: str) -> None:
    model, call = Head(FORMS[form]), Call.flatten(data(), {})
    with torch.autocast("cpu", torch.bfloat16):
        captured = slice_losses(capture(model, call), least_fraction=0.0)
        assert captured is not None
        assert_same_step(captured, model, call, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("form", ["label smoothing", "accuracy inside", "shifted and copied", "class weights", "indexed"])
@pytest.mark.parametrize("batch", [4, 1])
def test_a_loss_in_compiled_slices(form: str, batch: int) -> None:
    compiler = Inductor(pads=False)
    model, call = Head(FORMS[form]).double(), Call.flatten(data(batch, 48 // batch), {})
    captured = slice_losses(capture(model, call, compiler=compiler), compiler, least_fraction=0.0)
    assert captured is not None
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", ["head", "embed"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    model, call = Head(FORMS["label smoothing"]).double(), Call.flatten(data(), {})
    getattr(model, frozen).requires_grad_(False)
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


def test_a_weight_used_twice_has_both_gradients() -> None:
    model, call = Head(FORMS["class weights"]).double(), Call.flatten(data(), {})
    model.head.weight = model.embed.weight
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


def test_two_heads_are_both_cut() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Head(FORMS["label smoothing"]), Head(FORMS["gather"])

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.one(tokens, labels) + self.other(tokens, labels)

    model, call = Two().double(), Call.flatten(data(), {})
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    assert sum("scores_forward" in op.name for op in captured.graph.ops) == 2
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


def left_alone() -> dict[str, Loss]:
    """Each reads logits in a way that slices of rows do not compute."""

    def random(y: torch.Tensor, t: torch.Tensor, model: Head) -> torch.Tensor:
        return cross(*flat(functional.dropout(y, 0.5), t))

    def centred(y: torch.Tensor, t: torch.Tensor, model: Head) -> torch.Tensor:
        rows, words = flat(y, t)
        return cross(rows - rows.mean(0), words)

    def other_rows(y: torch.Tensor, t: torch.Tensor, model: Head) -> torch.Tensor:
        return -flat(y, t)[0].log_softmax(-1)[torch.arange(48).flip(0), t.view(-1)].mean()

    def every_row_but_the_first(y: torch.Tensor, t: torch.Tensor, model: Head) -> torch.Tensor:
        return -flat(y, t)[0].log_softmax(-1)[torch.arange(1, 48), t.view(-1)[1:]].mean()

    return {
        "other rows indexed": other_rows,
        "some rows indexed": every_row_but_the_first,
        "softmax over rows": lambda y, t, model: functional.nll_loss(flat(y, t)[0].log_softmax(0), flat(y, t)[1]),
        "logits returned": lambda y, t, model: (cross(*flat(y, t), label_smoothing=0.1), y),
        "random numbers": random,
        "mean over rows taken off": centred,
        "shifted by the mean of all": lambda y, t, model: cross(*flat(y - y.mean(), t)),
        "rows in another order": lambda y, t, model: cross(*flat(y.roll(1, 0), t)),
        "rows turned into classes": lambda y, t, model: cross(flat(y, t)[0].t(), torch.arange(WORDS) % 48),
        "running sum over rows": lambda y, t, model: cross(*flat(y.cumsum(0), t)),
    }


@pytest.mark.parametrize("form", left_alone())
@pytest.mark.parametrize("batch", [4, 1])
def test_what_is_not_row_by_row_is_left_alone(form: str, batch: int) -> None:
    model, call = Head(left_alone()[form]), Call.flatten(data(batch, 48 // batch), {})
    assert slice_losses(capture(model, call), least_fraction=0.0) is None


@pytest.mark.parametrize("both", [False, True])
def test_scores_whose_columns_are_rows_too_are_left_alone(both: bool) -> None:
    """Contrastive, over rows or as CLIP over columns too: a slice would need the other samples' gradients."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = functional.normalize(self.one(x)) @ functional.normalize(self.other(y)).t()
            target = torch.arange(len(x))
            loss = cross(scores, target, label_smoothing=0.1)
            return loss + cross(scores.t(), target) if both else loss

    call = Call.flatten((torch.randn(64, 4), torch.randn(64, 4)), {})
    assert slice_losses(capture(Pairs(), call), least_fraction=0.0) is None


@pytest.mark.parametrize("turned", [False, True])
def test_a_square_of_scores(turned: bool) -> None:
    """As many rows as classes: nothing may be taken for the other."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 48, bias=False)
            self.register_buffer("weights", torch.linspace(0.5, 1.5, 48))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            scores = self.head(torch.tanh(x))
            return cross(scores.t() if turned else scores, target, weight=self.weights)

    model, call = Square().double(), Call.flatten((torch.randn(48, 4, dtype=torch.float64), torch.arange(48)), {})
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert (captured is None) is turned
    if captured is not None:
        assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


def test_a_wide_layer_in_the_middle_is_no_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    call = Call.flatten((torch.randn(32, 8),), {})
    assert slice_losses(capture(model, call, loss_fn=lambda y: y.square().mean()), least_fraction=0.0) is None


def test_a_loss_of_the_known_pattern_beside_it_keeps_its_own_form() -> None:
    """Where only the known pattern is there, there is nothing to add but more slices."""
    plain = capture(Head(lambda y, t, model: cross(*flat(y, t))), Call.flatten(data(), {}))
    assert [num_slices(form) for form in LOSSES_IN_ROWS.run(plain, Context())] == [24]
    smooth = capture(Head(FORMS["label smoothing"]), Call.flatten(data(), {}))
    assert [num_slices(form) for form in LOSSES_IN_ROWS.run(smooth, Context())] == [8, 24]


def num_slices(captured: Captured) -> int:
    forward = next(c.target for op, c in zip(captured.graph.ops, captured.calls, strict=True) if "scores_forward" in op.name)
    assert isinstance(forward, Sliced)
    return forward.num_slices


class Margin(nn.Module):
    """As ArcFace: the classes' directions are the criterion's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1003, 32))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        cosine = functional.linear(functional.normalize(x), functional.normalize(self.weight))
        sine = (1 - cosine.pow(2)).clamp(0, 1).sqrt()
        turned = torch.where(cosine > -0.877, cosine * 0.877 - sine * 0.479, cosine - 0.24)
        chosen = torch.zeros_like(cosine).scatter_(1, target[:, None], 1.0)
        return cross((chosen * turned + (1 - chosen) * cosine) * 30.0, target)


def criteria() -> dict[str, tuple[nn.Module, nn.Module]]:
    torch.manual_seed(0)
    words = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1003))
    return {
        "weight": (words, nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 1003))),
        "label smoothing": (words, nn.CrossEntropyLoss(label_smoothing=0.1)),
        "margin": (nn.Sequential(nn.Linear(32, 32), nn.Tanh()), Margin()),
    }


@pytest.mark.parametrize("name", criteria())
def test_criteria_with_state_of_their_own_train_in_a_quarter(name: str) -> None:
    model, criterion = criteria()[name]
    plain_model, plain_criterion = copy.deepcopy(model), copy.deepcopy(criterion)
    x, target = torch.randn(256, 32), torch.randint(0, 1003, (256,))
    options: dict[str, Any] = {"loss_fn": criterion, "example_targets": (target,), "engine": "eager", "time_limit_s": 5}
    free: Any = memfit.fit(model, (x,), budget="1TiB", planner="keep_all", **options)
    budget = int(0.26 * free.report().keep_all_peak_bytes)
    fitted: Any = memfit.fit(model, (x,), budget=budget, **options)
    for _ in range(2):
        model.zero_grad()
        criterion.zero_grad()
        loss = fitted(x, target)
        loss.backward()
    report = fitted.report()
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget
    assert any("losses-in-rows" in note for note in report.notes)
    expected = plain_criterion(plain_model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    ours, plain = [*model.parameters(), *criterion.parameters()], [*plain_model.parameters(), *plain_criterion.parameters()]
    scale = max(float(q.grad.abs().max()) for q in plain)  # type: ignore[union-attr]
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-5 * scale)
