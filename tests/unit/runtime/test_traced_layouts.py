"""Kernels that lay their results out otherwise than tracing said: the step is right from the first one on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training import same, twin
from torch import nn
from torch.nn import functional

import memfit
from memfit.core.simulate import simulate

ACTIVATIONS = (functional.softplus, functional.hardswish, functional.elu, functional.mish, functional.leaky_relu, functional.logsigmoid)


class Mixer(nn.Module):
    """An activation of a transposed value whose gradient comes contiguous: which of the two layouts its own gradient has is up to the kernel."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(6, 5), nn.Linear(4, 3), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(x).transpose(1, 2))).square().mean()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
def test_gradients_of_transposed_values_are_the_plain_models(activation: Any) -> None:
    torch.manual_seed(0)
    model, x = Mixer(activation), torch.randn(7, 4, 6)
    plain = twin(model)
    fitted: Any = memfit.fit(model, (x,), budget="1MiB")
    for _ in range(3):
        fitted(x).backward()
        plain(x).backward()
        assert all(same(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_only_what_lies_otherwise_is_copied_after_the_first_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 4, 6)
    model = Mixer(functional.softplus)
    fitted: Any = memfit.fit(model, (x,), budget="1MiB")
    assert fitted._memfit.latest.ready.program.source.count("lay(") > 10
    fitted(x).backward()
    program = fitted._memfit.latest.ready.program
    assert program.source.count("lay(") == 1
    ready = fitted._memfit.latest.ready
    assert simulate(ready.captured.graph, ready.plan.schedule, ready.costs).peak_bytes == ready.plan.timeline.peak_bytes
