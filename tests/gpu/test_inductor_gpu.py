"""The compiled engine on a CUDA device: the plain model's gradients, the promised bytes, the same dropout masks, one layout throughout."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.cli.torch_demo import SmallGPT, SmallResNet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[2]


def convolutions() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = SmallResNet(width=32).cuda().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(32, 3, 64, 64, device="cuda", dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    return model, x, torch.randint(0, 10, (32,), device="cuda")


def language() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (32, 128), device="cuda")
    return SmallGPT(width=128).cuda().double(), tokens, tokens.roll(-1, 1).flatten()


def fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor, budget: int | str, **more: object) -> nn.Module:
    return memfit.fit(
        model, (x,), budget=budget, loss_fn=nn.functional.cross_entropy, example_targets=(y,), engine="inductor", time_limit_s=3, **more
    )


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("example", [convolutions, language])
def test_gradients_are_the_plain_model_s_and_bytes_are_the_promised_ones(
    example: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]],
) -> None:
    model, x, y = example()
    without_dropout(model)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    whole = fit(copy.deepcopy(model), x, y, "100GiB")
    whole(x, y).backward()
    budget = int(0.6 * whole.report().measured_peak_bytes)
    del whole
    fitted = fit(model, x, y, budget)
    for _ in range(3):
        fitted.zero_grad(set_to_none=True)
        fitted(x, y).backward()
    report = fitted.report()
    assert report.measured_peak_bytes <= budget
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.01 * budget
    for ours, reference in zip(fitted.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert reference.grad is not None
        assert ours.grad.stride() == ours.stride()
        worst = (ours.grad - reference.grad).abs().max() / reference.grad.abs().max().clamp_min(1e-9)
        assert worst < 1e-6


def test_recomputation_draws_the_masks_of_the_first_run() -> None:
    model, tokens, targets = language()
    found, budget = [], 100 * 2**30
    for _ in range(2):
        fitted = fit(copy.deepcopy(model), tokens, targets, budget, check=False)
        for _ in range(2):
            fitted.zero_grad(set_to_none=True)
            torch.manual_seed(7)
            fitted(tokens, targets).backward()
        budget = int(0.55 * fitted.report().measured_peak_bytes)
        found.append([p.grad for p in fitted.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_auto_compiles_on_a_gpu_what_is_large_and_falls_back_on_what_is_not() -> None:
    model, x, y = convolutions()
    fitted = memfit.fit(model, (x,), budget="100GiB", loss_fn=nn.functional.cross_entropy, example_targets=(y,), check=False)
    fitted(x, y).backward()
    assert fitted._memfit.latest.ready.captured.compiled
    small = nn.Linear(8, 8).cuda()
    tiny = memfit.fit(small, (torch.randn(4, 8, device="cuda"),), budget="1GiB", check=False)
    tiny(torch.randn(4, 8, device="cuda")).sum().backward()
    assert not tiny._memfit.latest.ready.captured.compiled


ARENA = """
import json, sys
sys.path[:0] = [{source!r}, {root!r}]
import torch, memfit
memfit.use_planned_arena()
from tests.gpu.test_inductor_gpu import convolutions, fit
model, x, y = convolutions()
whole = memfit.estimate(model, (x,), loss_fn=torch.nn.functional.cross_entropy, example_targets=(y,)).peak_bytes
budget = int(0.6 * whole)
fitted = fit(model, x, y, budget, check=False)
for _ in range(12):
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    fitted(x, y).backward()
    torch.cuda.synchronize()
print(json.dumps({{"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated(), "budget": budget,
                   "arena": fitted.report().arena_bytes, "notes": fitted.report().notes,
                   "finite": all(bool(p.grad.isfinite().all()) for p in model.parameters())}}))
"""


def test_reserved_bytes_with_the_planned_arena() -> None:
    text = ARENA.format(source=str(ROOT / "src"), root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(result)
    assert result["finite"]
    assert result["arena"] is not None
    assert result["allocated"] <= result["budget"]
    assert result["reserved"] <= result["budget"]
