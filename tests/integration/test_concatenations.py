"""Steps whose concatenations have their gradients by parts, run: the plain model's gradients, the planned bytes, smaller budgets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.training import needs_a_compiler
from tests.without_passes import leave_out
from torch import nn

import memfit
from memfit.core.errors import InfeasibleBudget
from memfit.kernels.concat_gradients import GradientOfPart
from memfit.passes.step.concat_gradients import split_concat_gradients
from memfit.pipeline.forms import Form, Forms

torch.set_num_threads(1)  # more threads wait for each other on a busy machine


class SmallUNet(nn.Module):
    """One skip connection over all the resolution there is."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        pixels: torch.Tensor = self.head(self.merge(torch.cat([skip, self.up(self.bottom(skip))], 1)))
        return pixels


def example() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = SmallUNet().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    return model, x, torch.randint(0, 2, (3, 32, 32))


def fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor, budget: int | str, engine: str, **more: Any) -> Any:
    kwargs: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "example_targets": (y,), "engine": engine, "time_limit_s": 4, **more}
    return memfit.fit(copy.deepcopy(model), (x,), budget=budget, **kwargs)


def parts_run(fitted: Any) -> int:
    """How many gradients of parts the plan works out."""
    calls = fitted._memfit.latest.ready.captured.calls
    return sum(isinstance(calls[step.op].target, GradientOfPart) for step in fitted.plan.schedule.computes)


def minimum(model: nn.Module, x: torch.Tensor, y: torch.Tensor, engine: str) -> int:
    with pytest.raises(InfeasibleBudget) as refusal:
        fit(model, x, y, 1000, engine)
    found = refusal.value.minimum_bytes
    assert found is not None
    return found


def assert_runs(fitted: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor, budget: int) -> None:
    plain = copy.deepcopy(model)
    reference = nn.functional.cross_entropy(plain(x), y)
    reference.backward()
    loss = fitted(x, y)
    loss.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    for a, b in zip(fitted.parameters(), plain.parameters(), strict=True):
        assert a.grad.stride() == a.stride()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)
    report = fitted.report()
    assert report.measured_peak_bytes <= budget
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.01 * report.measured_peak_bytes


@needs_a_compiler
def test_compiled_below_what_the_whole_gradient_needs() -> None:
    model, x, y = example()
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch, "concat-gradients")
        whole = minimum(model, x, y, "inductor")
    budget = int(0.97 * whole)
    fitted = fit(model, x, y, budget, "inductor")
    assert parts_run(fitted) == 2
    assert_runs(fitted, model, x, y, budget)
    again = fit(model, x, y, budget, "inductor", plan=fitted.plan)
    assert parts_run(again) == 2
    assert parts_run(fit(model, x, y, "1GiB", "inductor", allow=("recompute",))) == 0


def test_eager_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = example()
    monkeypatch.setattr(Forms, "usual", _only_by_parts)
    fitted = fit(model, x, y, "1GiB", "eager")
    assert parts_run(fitted) == 2
    assert_runs(fitted, model, x, y, 2**30)
    monkeypatch.undo()
    assert parts_run(fit(model, x, y, "1GiB", "eager")) == 0  # the step as it is comes first


def _only_by_parts(forms: Forms) -> Iterator[Form]:
    captured = split_concat_gradients(forms.plain)
    assert captured is not None
    yield Form(name="by parts", captured=captured)
