"""The check of the first step, or of all: silent on everything a right training run does, and it still finds what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, batch, deep, fit_tight, recomputes, same
from torch import nn
from torch.nn import functional

import memfit

CHECKED = "identical to the plain model's"


def small(dropout: float = 0.0, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6)]
    return nn.Sequential(*parts[:1], nn.BatchNorm1d(16), *parts[1:]) if norm else nn.Sequential(*parts)


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))


def fit(model: nn.Module, x: torch.Tensor | None = None, *, check: bool | str = True, **options: Any) -> Any:
    return memfit.fit(model, (rows() if x is None else x,), budget=NO_LIMIT, planner="keep_all", check=check, **options)


def trained(run: Callable[[Any], None], make: Callable[[], nn.Module], **options: Any) -> Any:
    """The same loop over the plain model and the fitted one; the fitted one, with everything compared."""
    plain, model = make(), make()
    fitted = fit(model, **options)
    for module in (plain, fitted):
        torch.manual_seed(5)
        run(module)
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert same([*plain.buffers()], [*model.buffers()])
    return fitted


def under_autocast(module: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(rows()).float().square().mean()
    loss.backward()


def two_forwards(module: Any) -> None:
    (module(rows(1)).sum() + module(rows(2)).square().sum()).backward()


def second_goes_back_first(module: Any) -> None:
    first, second = module(rows(1)), module(rows(2))
    second.square().sum().backward()
    first.sum().backward()


def composed(module: Any) -> None:
    module(module(rows())).sum().backward()


def output_in_place(module: Any) -> None:
    out = module(rows())
    out.mul_(2).add_(1)
    out.sum().backward()


def switched_to_evaluation(module: Any) -> None:
    loss = module(rows()).square().sum()
    module.eval()
    loss.backward()
    module.train()


def all_under_autocast(module: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(rows()).float().square().mean().backward()


def accumulating(module: Any) -> None:
    for seed in range(3):
        module(rows(seed)).sum().backward()


def discriminating(module: Any) -> None:
    """As a GAN's second half: an input that requires a gradient, and one that does not, before one backward."""
    made = rows(3).requires_grad_()
    (module(rows(1)).sigmoid().log().mean() + (1 - module(made * 2).sigmoid()).log().mean()).backward()
    module(made * 2).sum().backward()


LOOPS = [
    under_autocast,
    two_forwards,
    second_goes_back_first,
    composed,
    output_in_place,
    switched_to_evaluation,
    all_under_autocast,
    accumulating,
    discriminating,
]


@pytest.mark.parametrize("check", [True, "every step"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_no_false_alarm_in_ordinary_loops(loop: Any, dropout: float, norm: bool, check: bool | str) -> None:
    trained(loop, lambda: small(dropout, norm=norm), check=check)


@pytest.mark.parametrize("dropout", [0.1, 0.3, 0.5])
def test_half_precision_with_dropout_is_the_plain_models_in_bits(dropout: float) -> None:
    def run(module: Any) -> None:
        module(rows().bfloat16()).square().sum().backward()

    fitted = trained(run, lambda: small(dropout).bfloat16(), x=rows().bfloat16())
    assert CHECKED in fitted.report().check


def test_a_grad_scaler_and_autocast_as_pytorch_writes_it() -> None:
    plain, model = small(), small()
    fitted = fit(model)
    for module in (plain, fitted):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for k in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.mse_loss(module(rows(k)), rows(9))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert same([*plain.parameters()], [*model.parameters()])


def test_all_parameters_frozen_and_a_gradient_for_the_input() -> None:
    model = small().requires_grad_(False)
    x, reference = rows().requires_grad_(), rows().requires_grad_()
    fitted = fit(model, x)
    fitted(x).square().sum().backward()
    model(reference).square().sum().backward()
    assert torch.equal(x.grad, reference.grad)
    assert CHECKED in fitted.report().check
    assert all(p.grad is None for p in model.parameters())


def test_autocast_around_backward_alone_makes_no_alarm() -> None:
    """Gradients are those of a backward outside, as PyTorch asks for: the plan's casts are the forward's."""
    plain, model = small(), small()
    fitted = fit(model)
    loss = fitted(rows()).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    plain(rows()).square().sum().backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert CHECKED in fitted.report().check


def test_a_model_that_differs_from_itself_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model's result is another one at each run, as kernels with atomics make it, only more so."""
    fitted = fit(small())
    stepper, numbers = fitted._memfit, random.Random(0)
    plain = stepper.plain
    monkeypatch.setattr(stepper, "plain", lambda args, kwargs: plain(args, kwargs) * numbers.uniform(0.5, 2))
    fitted(rows()).sum().backward()
    assert fitted.report().check != "not run"
    assert all(p.grad is not None for p in fitted.parameters())


def test_a_tight_budget_is_checked_too() -> None:
    fitted = fit_tight(deep(), (batch()[0],), fraction=0.6)
    assert recomputes(fitted)
    x, y = batch()
    functional.cross_entropy(fitted(x), y).backward()
    assert CHECKED in fitted.report().check


def test_where_memory_is_short_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.runtime.closed_loop.free_bytes", lambda device: 1000)
    fitted = fit(small())
    fitted(rows()).sum().backward()
    assert any("not checked" in note for note in fitted.report().notes)


def test_a_plain_model_that_runs_out_of_memory_is_not_judged() -> None:
    fitted = fit(small())
    fitted(rows(2))  # the trial's forward
    stepper = fitted._memfit
    out = fitted(rows())
    stepper.latest.steps = 0
    out = fitted(rows())

    def short(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no room for the plain model")

    stepper.model.forward = short
    out.sum().backward()
    del stepper.model.forward
    assert any("could not be run again: no room" in note for note in fitted.report().notes)
    assert all(p.grad is not None for p in fitted.parameters())


def all_shapes(fitted: Any) -> list[Any]:
    return [shape for stepper in fitted._memfit._steppers() for shape in stepper.shapes.values()]


def make_wrong(fitted: Any, part: str) -> None:
    """The plan's own program gives another output, gradient or buffer from now on."""
    program = fitted._memfit.latest.ready.program
    forward, backward = program.forward, program.backward

    def wrong_forward(*args: Any) -> Any:
        outputs, mutations, saved = forward(*args)
        if part == "buffer":
            mutations = [m * 3 for m in mutations]
        return [o * 2 for o in outputs] if part == "output" else outputs, mutations, saved

    def wrong_backward(saved: Any, tangents: Any, put: Any, *rest: Any) -> None:
        def twice(position: int, gradient: torch.Tensor, keeps: bool) -> None:
            put(position, gradient * 2 if position == 0 else gradient, keeps)

        backward(saved, tangents, twice if part == "gradient" else put, *rest)

    object.__setattr__(program, "forward", wrong_forward)
    object.__setattr__(program, "backward", wrong_backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("part", ["output", "gradient", "buffer"])
def test_a_wrong_step_is_found(part: str, dtype: torch.dtype) -> None:
    """The plan's own program is made wrong; the check must stop it whatever the type."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 6)).to(dtype)
    x = rows().to(dtype)
    fitted = fit(model, x)
    make_wrong(fitted, part)
    with pytest.raises(memfit.MemfitError, match=r"differs from the plain model by .* at (output|gradient|buffer)"):
        fitted(x).square().sum().backward()


def test_a_change_that_the_plan_does_not_read_makes_no_alarm() -> None:
    """The last bias is not read in backward: an optimizer may step it, and the plain model cannot be compared any more."""
    model = small()
    fitted = fit(model)
    out = fitted(rows())
    with torch.no_grad():
        model[-1].bias.add_(1)
    out.sum().backward()
    assert any("changed between forward and backward" in note for note in fitted.report().notes)


def optimize(module: Any, steps: int) -> None:
    """Accumulation, a scheduler, evaluation in between, a last short batch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        module(rows(step)).square().mean().backward()
        module(rows(step + 50)[: 32 if step < steps - 1 else 7]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            module(rows())
        module.train()
    module(rows()).square().mean().backward()


def test_every_step_is_compared_and_nothing_else_changes() -> None:
    def run(module: Any) -> None:
        optimize(module, 5)

    fitted = trained(run, lambda: small(0.2, norm=True), check="every step")
    shapes = all_shapes(fitted)
    assert sum(shape.compared_steps for shape in shapes) == 11
    assert fitted.report().check == "outputs, gradients and buffers identical to the plain model's, bit for bit, in each of 6 steps"
    assert not [note for shape in shapes for note in shape.notes]


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("part", ["output", "gradient", "buffer"])
def test_a_later_step_that_goes_wrong_is_found_and_taken_back(part: str, accumulates: bool) -> None:
    fitted = fit(small(norm=True), check="every step")

    def step(seed: int) -> None:
        fitted(rows(seed)).square().sum().backward()

    for seed in range(4):
        if not accumulates:
            fitted.zero_grad()
        step(seed)
    before = [p.grad.clone() for p in fitted.parameters()]
    if not accumulates:
        fitted.zero_grad()
    make_wrong(fitted, part)
    with pytest.raises(memfit.MemfitError, match="were wrong, and are taken back"):
        step(9)
    assert same([p.grad for p in fitted.parameters()], before if accumulates else [None] * len(before))


def test_the_first_step_alone_is_compared_unless_asked() -> None:
    fitted = fit(small())
    for seed in range(3):
        fitted.zero_grad()
        fitted(rows(seed)).sum().backward()
    assert [shape.compared_steps for shape in all_shapes(fitted)] == [1]


@pytest.mark.parametrize("check", ["every", "first", 2, None, ["auto"]])
def test_what_is_not_a_check_is_refused(check: Any) -> None:
    with pytest.raises(memfit.BadInput, match="'every step'"):
        fit(small(), check=check)
