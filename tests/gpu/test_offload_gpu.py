"""Values that wait on the host, on a CUDA device: the plain model's gradients, the promised bytes, copies that overlap ops."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.gpu.test_inductor_gpu import convolutions, fit, without_dropout
from torch import nn

from memfit.core.schedule import Offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_gradients_are_the_plain_models_at_every_step_and_bytes_the_promised_ones() -> None:
    model, x, y = convolutions()
    without_dropout(model)
    plain = copy.deepcopy(model)
    whole = fit(copy.deepcopy(model), x, y, "100GiB", allow=("recompute",))
    budget = int(0.6 * whole.plan.timeline.peak_bytes)
    del whole
    fitted = fit(model, x, y, budget, allow=("recompute", "offload"))
    assert any(isinstance(step, Offload) for step in fitted.plan.schedule.steps)
    for _ in range(5):  # the first step is measured, later ones run ahead of the device
        model.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        fitted(x, y).backward()
        nn.functional.cross_entropy(plain(x), y).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10)
        x.copy_(torch.randn_like(x))
    assert fitted.report().measured_peak_bytes <= budget


def test_copies_are_hidden_behind_matrix_products() -> None:
    """Large layers on a fast device: the judge expects copies to cost nothing, and the clock agrees within a quarter (1.11 was measured
    beside other tests)."""
    torch.manual_seed(0)
    width, rows = 4096, 16384
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)), nn.Linear(width, 10)).cuda().bfloat16()
    x, y = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16), torch.randint(0, 10, (rows,), device="cuda")
    whole = fit(model, x, y, "100GiB")
    peak = whole.plan.timeline.peak_bytes
    del whole
    fitted = fit(model, x, y, int(0.8 * peak), allow=("recompute", "offload"))
    sent = sum(isinstance(step, Offload) for step in fitted.plan.schedule.steps)
    times = []
    for _ in range(12):
        model.zero_grad(set_to_none=True)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fitted(x, y).backward()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    predicted = fitted.plan.timeline.time_ns / 1e6
    print("sent", sent, "predicted", predicted, "measured", sorted(times)[:6])
    assert sorted(times)[2] < 1.25 * predicted
