"""Costs: the table of devices, the roofline, and first calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.training import batch, deep
from torch import nn

from memfit.capture.captured import OpCall
from memfit.capture.inputs import Call
from memfit.core.errors import BadInput
from memfit.kernels.compiler import PlainOps
from memfit.kernels.fused_loss import FusedLoss
from memfit.pipeline.capture import capture
from memfit.profile import devices
from memfit.profile import measure as measured_module
from memfit.profile.devices import Device, device, register
from memfit.profile.measure import first_calls
from memfit.profile.roofline import roofline


def step() -> Any:
    return capture(deep(), Call.flatten((batch()[0],), {}))


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEVICES", dict(devices.DEVICES))  # what is registered here is forgotten afterwards
    assert device("H200").memory_bytes > 100 * 2**30
    assert device("rtx 4090").name == "rtx4090"
    with pytest.raises(BadInput, match="register"):
        device("abacus")
    register(Device(name="abacus", memory_bytes=10, memory_bytes_per_s=1, fp32_flops=1, half_flops=1, link_bytes_per_s=1))
    assert device("abacus").memory_bytes == 10
    assert "abacus" in devices.DEVICES


def test_the_roofline_costs_views_nothing_and_products_by_their_arithmetic() -> None:
    captured = step()
    costs = roofline(captured, "h200")
    named = list(zip(captured.graph.ops, costs.op_time_ns, strict=True))
    assert all(ns == 0 for op, ns in named if op.name in ("aten.t.default", "aten.view.default"))
    assert all(ns > 0 for op, ns in named if "mm" in op.name or "batch_norm" in op.name)
    big = capture(nn.Linear(2048, 2048), Call.flatten((torch.randn(2048, 2048),), {}))
    product = next(i for i, op in enumerate(big.graph.ops) if "addmm" in op.name)
    expected = 2 * 2048**3 / device("h200").fp32_flops * 1e9
    assert roofline(big, "h200").op_time_ns[product] == pytest.approx(expected + device("h200").launch_ns, rel=0.01)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_first_calls_are_made_one_by_one_where_a_library_loads_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        is_compiled = False

    lazy = FusedLoss(PlainOps(), reduction=1, ignore=-100, dtype=torch.float32)
    targets: list[Any] = [torch.relu, Compiled(), torch.mm, torch.tanh, lazy]
    called = list[int]()

    class Step:
        device = torch.device(kind)

        def call(self, op: int, _variant: int) -> OpCall:
            return OpCall(target=targets[op])

    def run(op: int) -> None:
        called.append(op)
        if op == 2:
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(measured_module, "_runner", lambda _, op, __: lambda: run(op))
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    calls = first_calls(Step(), [(op, 0) for op in range(5)])  # type: ignore[arg-type]
    if kind == "cuda":
        next(calls)
        assert called == [0]
        assert len(list(calls)) == 2
        assert called == [0, 2, 3]  # the fused loss compiles when it is called: its kernels would not be built yet
    else:
        assert not list(calls)
        assert not called
