"""A block in slices of the batch on a CUDA device: below what whole ops need, the plain gradients, the promised bytes, also as CUDA graphs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tests.training import assert_trains_inside
from torch import nn

import memfit
from memfit.core.errors import InfeasibleBudget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def small_vgg() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inner = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU(inplace=True)]
            inner = width
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10)).cuda().double()
    x = torch.randn(70, 3, 64, 64, device="cuda", dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), x, torch.randint(0, 10, (70,), device="cuda")  # type: ignore[call-overload]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("engine", ["inductor", "eager"])
def test_below_the_minimum_of_whole_ops(engine: str, replay: bool) -> None:
    gc.collect()  # what earlier tests left would be held elsewhere
    model, x, y = small_vgg()
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    kwargs: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "example_targets": (y,), "engine": engine, "time_limit_s": 5}
    with pytest.raises(InfeasibleBudget) as refusal:
        memfit.fit(copy.deepcopy(model), (x,), budget=2**20, allow=("recompute",), **kwargs)
    assert refusal.value.minimum_bytes is not None
    budget = int(refusal.value.minimum_bytes * (0.75 if engine == "inductor" else 0.6))
    fitted: Any = memfit.fit(model, (x,), budget=budget, replay=replay, **kwargs)
    names = [op.name for op in fitted._memfit.latest.ready.captured.graph.ops]
    assert any(name.startswith("memfit.sliced_backward") for name in names)
    assert_trains_inside(fitted, plain, (x, y), budget, replay=replay)
