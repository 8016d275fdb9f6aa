"""Steps with a block in slices of the batch, run: the plain model's gradients, the planned bytes, budgets that no whole op fits into."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.training import needs_a_compiler
from tests.without_passes import leave_out
from torch import nn

import memfit
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.core.errors import BadInput, InfeasibleBudget
from memfit.passes.slicing.slice_blocks import slice_blocks
from memfit.passes.slicing.sliced_call import Sliced
from memfit.passes.table import PIPELINE
from memfit.pipeline.capture import capture
from memfit.pipeline.forms import Form, Forms

torch.set_num_threads(1)  # more threads wait for each other on a busy machine
ENGINES = ["eager", pytest.param("inductor", marks=needs_a_compiler)]
CROSS_ENTROPY: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy}
SLICINGS = {slot.rewrite.name for slots in PIPELINE.values() for slot in slots if "blocks-in" in slot.rewrite.name}


def network(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inner = 3
    for width in widths or (6, 8):
        layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        inner = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(inner * 36, 5)).double()


def data(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 24, 24, dtype=torch.float64), torch.randint(0, 5, (batch,))


def sliced_ops(fitted: Any) -> list[str]:
    return [op.name.split()[0] for op in fitted._memfit.latest.ready.captured.graph.ops if "sliced" in op.name]


def old_minimum(model: nn.Module, x: torch.Tensor, y: torch.Tensor, engine: str) -> int:
    """What every other form of the step cannot go below, proven."""
    kwargs: dict[str, Any] = {"example_targets": (y,), "engine": engine, "time_limit_s": 4, **CROSS_ENTROPY}
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch, *SLICINGS)
        with pytest.raises(InfeasibleBudget) as refusal:
            memfit.fit(copy.deepcopy(model), (x,), budget=1000, **kwargs)
    minimum = refusal.value.minimum_bytes
    assert minimum is not None
    return minimum


@pytest.fixture
def only_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other form of the step is offered."""
    usual = lambda forms: (Form(name="in slices", captured=captured) for captured in slice_blocks(forms.plain, None))  # noqa: E731
    monkeypatch.setattr(Forms, "usual", usual)


def assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert a.grad.stride() == b.grad.stride()
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_below_the_old_minimum_with_the_plain_gradients_in_the_planned_bytes(engine: str) -> None:
    model, (x, y) = network(*[6] * (engine == "inductor")), data(13)  # slices of two, and a last one of one
    model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = copy.deepcopy(model)
    reference = nn.functional.cross_entropy(plain(x), y)
    reference.backward()
    budget = old_minimum(model, x, y, engine) * 3 // 4
    kwargs: dict[str, Any] = {"budget": budget, "example_targets": (y,), "engine": engine, "time_limit_s": 4, **CROSS_ENTROPY}
    fitted = memfit.fit(copy.deepcopy(model), (x,), **kwargs)
    assert sliced_ops(fitted) == ["memfit.sliced_forward", "memfit.sliced_backward"]
    loss = fitted(x, y)
    loss.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    assert_same_gradients(fitted, plain)
    report = fitted.report()
    assert report.measured_peak_bytes <= budget
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.01 * budget
    again = memfit.fit(copy.deepcopy(model), (x,), plan=fitted.plan, **kwargs)  # the saved plan finds its form of the step
    again(x, y).backward()
    assert sliced_ops(again) == sliced_ops(fitted)
    for a, b in zip(again.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@needs_a_compiler
@pytest.mark.slow
def test_compiled_with_a_loss_outside() -> None:
    model, (x, y) = network(6), data(8)
    plain = copy.deepcopy(model)
    fitted = memfit.fit(model, (x,), budget=old_minimum(model, x, y, "inductor") * 3 // 4, engine="inductor", time_limit_s=4)
    assert sliced_ops(fitted) == ["memfit.sliced_forward", "memfit.sliced_backward"]
    nn.functional.cross_entropy(plain(x), y).backward()
    nn.functional.cross_entropy(fitted(x), y).backward()
    assert_same_gradients(fitted, plain)


@pytest.mark.usefixtures("only_slices")
def test_a_loss_outside_and_gradients_that_add_up() -> None:
    model, (x, y) = network(), data(7)
    plain = copy.deepcopy(model)
    fitted = memfit.fit(model, (x,), budget="1GiB", engine="eager")
    for part in (x, x.flip(0)):  # the second step finds gradients there
        nn.functional.cross_entropy(plain(part), y).backward()
        nn.functional.cross_entropy(fitted(part), y).backward()
        assert sliced_ops(fitted) == ["memfit.sliced_forward", "memfit.sliced_backward"]
        assert_same_gradients(fitted, plain)


@pytest.mark.usefixtures("only_slices")
@pytest.mark.parametrize("num_frozen", [2, 4, 8])
def test_frozen_first_layers(num_frozen: int) -> None:
    model, (x, y) = network(), data(8)
    for parameter in list(model.parameters())[:num_frozen]:
        parameter.requires_grad_(False)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    fitted = memfit.fit(model, (x,), budget="1GiB", example_targets=(y,), engine="eager", **CROSS_ENTROPY)
    assert sliced_ops(fitted) == ["memfit.sliced_forward", *["memfit.sliced_backward"] * (num_frozen < 4)]
    fitted(x, y).backward()
    assert_same_gradients(fitted, plain)


@pytest.mark.usefixtures("only_slices")
def test_an_input_that_requires_grad() -> None:
    model, (x, y) = network(), data(8)
    plain, given = copy.deepcopy(model), x.clone().requires_grad_()
    nn.functional.cross_entropy(plain(given), y).backward()
    x.requires_grad_()
    fitted = memfit.fit(model, (x,), budget="1GiB", example_targets=(y,), engine="eager", **CROSS_ENTROPY)
    assert sliced_ops(fitted) == ["memfit.sliced_forward", "memfit.sliced_backward"]
    fitted(x, y).backward()
    assert_same_gradients(fitted, plain)
    assert x.grad is not None
    assert given.grad is not None
    torch.testing.assert_close(x.grad, given.grad, rtol=1e-12, atol=1e-13)


def test_not_offered_without_variants_nor_taken_where_the_step_fits() -> None:
    model, (x, y) = network(), data(8)
    minimum = old_minimum(model, x, y, "eager")
    kwargs: dict[str, Any] = {"example_targets": (y,), "engine": "eager", "time_limit_s": 4, **CROSS_ENTROPY}
    with pytest.raises(InfeasibleBudget):
        memfit.fit(copy.deepcopy(model), (x,), budget=minimum * 3 // 4, allow=("recompute",), **kwargs)
    whole = memfit.fit(copy.deepcopy(model), (x,), budget="1GiB", **kwargs)
    assert sliced_ops(whole) == []
    sliced = memfit.fit(copy.deepcopy(model), (x,), budget=minimum * 3 // 4, **kwargs)
    with pytest.raises(BadInput, match="another model"):
        memfit.fit(copy.deepcopy(model), (x,), budget=minimum, plan=sliced.plan, allow=("recompute",), **kwargs)


@needs_a_compiler
def test_a_slow_plan_has_the_block_in_slices_beside_it_and_the_faster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.pipeline import choice

    tried: list[str] = []
    slower = Forms.slower

    def note(forms: Forms) -> Any:
        return ((use, (tried.append(form.name) or form for form in way)) for use, way in slower(forms))

    monkeypatch.setattr(Forms, "slower", note)
    model, (x, y) = network(6), data(8)
    kwargs: dict[str, Any] = {"example_targets": (y,), "engine": "inductor", "budget": "1GiB", "time_limit_s": 4, **CROSS_ENTROPY}
    usual = memfit.fit(copy.deepcopy(model), (x,), **kwargs)
    assert tried == []  # not made, let alone compiled
    monkeypatch.setattr(choice, "_SLOW", 0.0)
    fitted = memfit.fit(copy.deepcopy(model), (x,), **kwargs)
    assert len(tried) == 2  # in four slices and in eight; these plans repeat nothing: a longer block cannot be faster
    assert fitted.plan.timeline.time_ns <= usual.plan.timeline.time_ns
    fitted(x, y).backward()


def backward_of(captured: Captured, num_slices: int) -> Sliced:
    (sliced, *_) = slice_blocks(captured, None, num_slices=num_slices)
    return next(c.target for c in reversed(sliced.calls) if isinstance(c.target, Sliced))


def test_half_precision_adds_up_in_single() -> None:
    model, (x, y) = network().to(torch.bfloat16), data(16)
    call = Call.flatten((x.to(torch.bfloat16), y), {})
    captured = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    (sliced, *_) = slice_blocks(captured, None)
    (op,) = (op for op in sliced.graph.ops if op.name.startswith("memfit.sliced_backward"))
    torch.manual_seed(2)
    inputs = [torch.randn(s.shape, dtype=s.dtype) for t in op.inputs if (s := sliced.samples[t]) is not None]
    wide = capture(model.double(), Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1)
    exact = backward_of(wide, 2)(*(t.double() for t in inputs))
    errors = []
    for num_slices in (2, 16):
        found = backward_of(captured, num_slices)(*inputs)
        assert all(t.dtype is torch.bfloat16 for t in found)
        errors.append(max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)))
    assert errors[1] <= 1.1 * errors[0]
