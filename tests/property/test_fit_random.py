"""Random small models at random budgets: gradients bitwise equal, predicted peak = measured peak <= budget."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.training import NO_LIMIT, fixed_bytes, held_bytes, peak_bytes, same, train, twin
from torch import nn

import memfit
from memfit.capture.lower.optimizer_bytes import SCALARS_BYTES

FEW = settings(
    max_examples=3, phases=(Phase.explicit, Phase.generate), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
WIDTH, ROWS = 8, 96


class Skip(nn.Module):
    """x + f(x): a value with two readers far apart."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Split(nn.Module):
    """Views of one storage that go different ways."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.body(x).chunk(2, dim=1)
        return torch.cat([b * a.sigmoid(), a.t().contiguous().t()], dim=1)


def _simple() -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda: nn.BatchNorm1d(WIDTH),
            lambda: nn.LayerNorm(WIDTH),
            lambda: nn.ReLU(inplace=True),
            lambda: nn.GELU(),
            lambda: nn.SiLU(),
            lambda: nn.Dropout(0.3),
            lambda: nn.Softmax(dim=1),
        ]
    )


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    torch.manual_seed(draw(st.integers(0, 1000)))
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(draw(st.integers(2, 5))):
        layers = [nn.Linear(WIDTH, WIDTH), *(make() for make in draw(st.lists(_simple(), max_size=3)))]
        parts.extend([draw(st.sampled_from([Skip, Split]))(*layers)] if draw(st.booleans()) else layers)
    if draw(st.booleans()):
        tied = nn.Linear(WIDTH, WIDTH)
        tied.weight = parts[0].weight
        parts.append(tied)
    return nn.Sequential(*parts)


def _fit(model: nn.Module, x: torch.Tensor, fraction: float, **options: Any) -> Any:
    """Fitted between the fixed bytes and keep-all, or None where no plan is found there."""
    free: Any = memfit.fit(model, (x,), budget=NO_LIMIT, planner="keep_all", check=False, **options)
    fixed, peak = fixed_bytes(free), free.plan.timeline.peak_bytes
    budget = fixed + round(fraction * (peak - fixed))
    try:
        return memfit.fit(model, (x,), budget=budget, planner="greedy", check=False, **options)
    except (memfit.InfeasibleBudget, memfit.NoPlanFound):
        return None


@FEW
@given(models(), st.floats(0.4, 1.0))
def test_training_is_bitwise_the_same(model: nn.Module, fraction: float) -> None:
    plain, x = twin(model), torch.randn(ROWS, WIDTH)
    fitted = _fit(model, x, fraction)
    if fitted is not None:
        assert same(train(fitted, [(x,)] * 3, loss_fn=torch.mean), train(plain, [(x,)] * 3, loss_fn=torch.mean))


@FEW
@given(models(), st.floats(0.4, 1.0))
def test_the_step_takes_exactly_the_predicted_bytes(model: nn.Module, fraction: float) -> None:
    x = torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = _fit(model, x, fraction, optimizer=optimizer, loss_fn=torch.mean)
    if fitted is None:
        return

    def step() -> None:
        fitted(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = peak_bytes(step, held_bytes(model, optimizer, x))
    assert 0 <= fitted.plan.timeline.peak_bytes - measured <= SCALARS_BYTES
    assert measured <= fitted.report().budget_bytes


@FEW
@given(models(), st.floats(0.4, 1.0), st.integers(2, 3))
def test_accumulating_micro_steps_is_exact_and_inside(model: nn.Module, fraction: float, micro_steps: int) -> None:
    plain = twin(model)
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(micro_steps)]
    fitted = _fit(model, inputs[0], fraction, loss_fn=torch.mean)
    if fitted is None:
        return
    for module, call in ((plain, lambda x: plain(x).mean()), (fitted, fitted)):
        torch.manual_seed(5)
        for x in inputs:
            try:
                call(x).backward()
            except (memfit.InfeasibleBudget, memfit.NoPlanFound):
                return  # the gradients of earlier micro-steps take what this budget had to spare
        module.result = [p.grad for p in module.parameters()]
    assert same(plain.result, fitted.result)
    assert fitted.report().measured_peak_bytes <= fitted.report().budget_bytes
