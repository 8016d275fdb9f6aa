"""The budget: what counts, that it holds, what is refused, and what is done about a miss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, batch, deep, fit_tight, held_bytes, peak_bytes, recomputes, same, train, twin
from torch import nn
from torch.nn import functional

import memfit
from memfit.capture.lower.optimizer_bytes import SCALARS_BYTES
from memfit.runtime.closed_loop import Stepper


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adagrad])
def test_the_whole_step_is_predicted_to_the_byte_and_stays_inside(make: Any) -> None:
    model = deep()
    x, y = batch()
    optimizer = make(model.parameters())
    fitted = fit_tight(model, (x,), fraction=0.9, optimizer=optimizer, loss_fn=functional.cross_entropy, example_targets=(y,))

    def step() -> None:
        fitted(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = peak_bytes(step, held_bytes(model, optimizer, x, y))
    assert 0 <= fitted.plan.timeline.peak_bytes - measured <= SCALARS_BYTES
    assert measured <= fitted.report().budget_bytes


def test_convolution_workspaces_are_measured() -> None:
    torch.manual_seed(0)
    layers = [m for k in range(4) for m in (nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 4))
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))
    fitted = fit_tight(model, (x,), fraction=0.8, loss_fn=functional.cross_entropy, example_targets=(y,))
    fitted(x, y).backward()
    model.zero_grad()
    measured = peak_bytes(lambda: fitted(x, y).backward(), held_bytes(model, None, x, y))
    assert measured == fitted.plan.timeline.peak_bytes
    assert 0 <= measured - fitted.report().measured_peak_bytes <= 16  # the first step's loss and its gradient lie between two measurements


def test_a_loss_outside_has_its_reserve() -> None:
    x, y = batch()
    plain: Any = memfit.fit(deep(), (x,), budget=NO_LIMIT, planner="keep_all")
    reserved: Any = memfit.fit(deep(), (x,), budget=NO_LIMIT, planner="keep_all", reserve="1MiB")
    assert reserved.plan.timeline.peak_bytes >= 2**20 > plain.plan.timeline.peak_bytes
    functional.cross_entropy(reserved(x), y).backward()


@pytest.mark.parametrize("budget", [0, 1, "10B"])
def test_an_impossible_budget_is_refused_with_the_proof(budget: Any) -> None:
    x, _ = batch()
    model = deep()
    before = train_free(model)
    with pytest.raises(memfit.InfeasibleBudget) as caught:
        memfit.fit(model, (x,), budget=budget)
    assert caught.value.minimum_bytes > 1000
    assert "proven minimum" in str(caught.value)
    assert same(before, train_free(model))


def train_free(model: nn.Module) -> Any:
    return [{k: v.clone() for k, v in model.state_dict().items()}, [p.grad for p in model.parameters()]]


def test_the_refusal_names_the_op() -> None:
    x, _ = batch()
    model = deep(dropout=0.0)
    fixed = sum(p.nbytes for p in model.parameters()) * 2 + sum(b.nbytes for b in model.buffers()) + x.nbytes
    with pytest.raises(memfit.InfeasibleBudget, match=r"op \d+ \(aten"):
        memfit.fit(model, (x,), budget=fixed + 100)


@pytest.mark.parametrize("budget", ["banana", "-5GiB", -1, "", None, 1.5, "6 potatoes", float("nan"), True])
def test_nonsense_budgets_are_bad_input(budget: Any) -> None:
    with pytest.raises(memfit.MemfitError):
        memfit.fit(deep(), (batch()[0],), budget=budget)


def test_a_huge_budget_recomputes_nothing() -> None:
    fitted = memfit.fit(deep(), (batch()[0],), budget="100TiB", planner="greedy")
    assert not recomputes(fitted)


def test_wrong_options_are_named() -> None:
    x, _ = batch()
    for options in ({"engine": "warp"}, {"allow": ("magic",)}, {"check": "sometimes"}, {"example_targets": (x,)}, {"planner": "oracle"}):
        with pytest.raises(memfit.MemfitError):
            memfit.fit(deep(), (x,), budget="1GiB", **options)  # type: ignore[arg-type]
    with pytest.raises(memfit.MemfitError, match=r"nn\.Module"):
        memfit.fit(lambda x: x, (x,), budget="1GiB")  # type: ignore[arg-type]
    fitted = memfit.fit(deep(), (x,), budget="1GiB", planner="keep_all")
    with pytest.raises(memfit.MemfitError, match="fitted already"):
        memfit.fit(fitted, (x,), budget="1GiB")


# -- misses and failures ---------------------------------------------------------------------------------------------


def _failing_once(function: Any, at_call: int) -> Any:
    """Raises an out-of-memory error instead of its n-th call."""
    calls = [0]

    def wrapped(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call:
            raise torch.OutOfMemoryError("injected")
        return function(*args)

    return wrapped


def _fitted_and_plain() -> tuple[Any, nn.Module, Any, Any]:
    plain = deep()
    x, y = batch()
    fitted = fit_tight(twin(plain), (x,), fraction=1.0)
    return fitted, plain, x, y


def test_out_of_memory_in_forward_is_planned_again() -> None:
    fitted, plain, x, y = _fitted_and_plain()
    program = fitted._memfit.latest.ready.program
    object.__setattr__(program, "forward", _failing_once(program.forward, 1))
    assert same(train(fitted, [(x, y)] * 2), train(plain, [(x, y)] * 2))
    assert any("out of memory" in note for note in fitted.report().notes)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("trial", [True, False])
def test_out_of_memory_in_the_middle_of_backward_is_planned_again(trial: bool, again: bool) -> None:
    """`again`: the first tighter plan runs out of memory too, while forward is repeated."""
    fitted, plain, x, y = _fitted_and_plain()
    batches = [(x, y)] * 3
    shape = fitted._memfit.latest
    shape.settle_layouts(shape.ready)  # the code of later steps
    program = shape.ready.program
    backward, calls = program.backward, [0]

    def fails(saved: Any, tangents: Any, put: Any, *rest: Any) -> None:
        calls[0] += 1
        fail = calls[0] == (1 if trial else 2)
        return backward(saved, tangents, _failing_once(put, 4) if fail else put, *rest)

    prepare, made = shape.prepare, []

    def tighter(by: int) -> Any:
        ready = prepare(by)
        if again and not made:
            object.__setattr__(ready.program, "forward", _failing_once(ready.program.forward, 1))
        made.append(ready)
        return ready

    shape.prepare = tighter
    object.__setattr__(program, "backward", fails)
    assert same(train(fitted, batches), train(plain, batches))
    assert sum("out of memory" in note for note in fitted.report().notes) == 1 + again
    assert len(made) == 1 + again


def test_out_of_memory_without_a_smaller_plan_is_passed_on() -> None:
    fitted, _, x, _ = _fitted_and_plain()

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("injected for ever")

    shape = fitted._memfit.latest
    prepare, tried = shape.prepare, []

    def failing(tighter_by: int) -> Any:
        ready = prepare(tighter_by)
        object.__setattr__(ready.program, "forward", fails)
        tried.append(ready.plan.timeline.peak_bytes)
        return ready

    shape.prepare = failing
    object.__setattr__(shape.ready.program, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        fitted(x)
    assert len(tried) > 1
    assert tried == sorted(set(tried), reverse=True)  # tighter each time


def test_a_measured_miss_is_planned_again_tighter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter lies once and says the first step took a quarter more: the next plan aims lower and the numbers stay right."""
    plain = deep()
    x, y = batch()
    fitted = fit_tight(twin(plain), (x,), fraction=1.0)
    settle = Stepper.settle
    told: list[int] = []

    def lie(self: Stepper, shape: Any, measured: int, *rest: Any) -> None:
        told.append(measured)
        settle(self, shape, measured + measured // 20 if len(told) == 1 else measured, *rest)

    monkeypatch.setattr(Stepper, "settle", lie)
    before = fitted.plan.timeline.peak_bytes
    assert same(train(fitted, [(x, y)] * 3), train(plain, [(x, y)] * 3))
    assert fitted.plan.timeline.peak_bytes < before
    assert any("tighter" in note for note in fitted.report().notes)


class FullArena:
    """In place of a planned arena: it has always reserved too much."""

    def __init__(self, reserved: int) -> None:
        self.reserved, self.height_bytes = reserved, 0

    def start(self) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def finish(self) -> None: ...

    def reserved_bytes(self) -> int:
        return self.reserved


@pytest.mark.parametrize("fraction", [1.0, 1.1])
@pytest.mark.parametrize(("over", "is_planned_again"), [(2000, True), (0, False), (-1, False)])
def test_reserved_bytes_over_the_budget_are_planned_again_tighter(over: int, is_planned_again: bool, fraction: float) -> None:
    """Tighter than the plan was, however much of the budget it left."""
    x, y = batch()
    fitted = fit_tight(deep(), (x,), fraction=fraction)
    train(fitted, [(x, y)])
    shape, budget, before = fitted._memfit._current(), fitted.report().budget_bytes, fitted.plan.timeline.peak_bytes
    shape.ready = replace(shape.ready, arena=FullArena(budget + over))
    train(fitted, [(x, y)] * 2)
    assert not shape.reserved_replans
    train(fitted, [(x, y)] * 2)
    assert fitted.report().budget_bytes == budget
    assert shape.tighter_by == (over + budget - before if is_planned_again else 0)
    assert fitted.plan.timeline.peak_bytes <= (before - over if is_planned_again else before)
    assert any(note.startswith("reserved") for note in fitted.report().notes) == is_planned_again


def test_an_interrupt_in_the_middle_of_backward_leaves_a_sane_model() -> None:
    plain = deep(dropout=0.0)
    x, y = batch()
    fitted = fit_tight(twin(plain), (x,), fraction=1.0)
    program = fitted._memfit.latest.ready.program
    backward = program.backward

    def interrupted(saved: Any, tangents: Any, put: Any, *rest: Any) -> None:
        count = [0]

        def stop(*args: Any) -> None:
            count[0] += 1
            if count[0] == 3:
                raise KeyboardInterrupt
            put(*args)

        backward(saved, tangents, stop, *rest)

    object.__setattr__(program, "backward", interrupted)
    loss = functional.cross_entropy(fitted(x), y)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    object.__setattr__(program, "backward", backward)
    assert [int(b) for n, b in fitted.named_buffers() if "num_batches" in n] == [1] * 4
    fitted.zero_grad()
    functional.cross_entropy(plain(x), y)  # the plain model saw one forward too
    assert same(train(fitted, [(x, y)] * 2), train(plain, [(x, y)] * 2))


def test_an_interrupt_in_forward_changes_no_buffer() -> None:
    x, _ = batch()
    fitted = fit_tight(deep(), (x,), fraction=1.0)
    before = {k: v.clone() for k, v in fitted.state_dict().items()}
    program = fitted._memfit.latest.ready.program
    forward = program.forward

    def interrupted(*args: Any) -> Any:
        forward(*args)
        raise KeyboardInterrupt

    object.__setattr__(program, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted(x)
    assert same(before, dict(fitted.state_dict()))


def test_a_form_that_rounds_otherwise_is_said() -> None:
    model, x, y = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2000, bias=False)),
        torch.randn(64, 8),
        torch.randint(0, 2000, (64,)),
    )
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "example_targets": (y,), "time_limit_s": 3}
    exact = memfit.fit(model, (x,), budget=NO_LIMIT, **options)
    assert exact.report().notes == ()
    with pytest.raises(memfit.InfeasibleBudget) as refusal:
        memfit.fit(model, (x,), budget=1, **options)
    least = refusal.value.minimum_bytes
    assert least is not None
    chunked: Any = memfit.fit(model, (x,), budget=int(1.2 * least), **options)
    chunked(x, y).backward()
    (note,) = chunked.report().notes
    assert note.startswith('form "')
    assert "rounded otherwise" in note
    with pytest.raises(memfit.InfeasibleBudget):
        memfit.fit(model, (x,), budget=int(1.2 * least), allow=("recompute",), **options)
