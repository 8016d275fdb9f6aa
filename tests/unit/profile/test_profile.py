"""Costs: the table of devices, the roofline, measured ops and the cache."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
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
from memfit.profile.cache import Cache
from memfit.profile.devices import Device, device, register
from memfit.profile.measure import Measurement, measure_costs
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


def test_measured_once_then_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = step()
    first = measure_costs(captured, cache=Cache(tmp_path))
    assert sum(first.op_time_ns) > 0

    def refuse(*args: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(measured_module, "_measure_op", refuse)
    assert measure_costs(captured, cache=Cache(tmp_path)) == first


def test_measuring_draws_no_random_numbers(tmp_path: Path) -> None:
    captured = step()
    torch.manual_seed(3)
    measure_costs(captured, cache=Cache(tmp_path))
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


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

    measurement = Measurement.__new__(Measurement)
    measurement.captured, measurement.missing = Step(), [("", (op, 0)) for op in range(5)]  # type: ignore[assignment]

    def run(op: int) -> None:
        called.append(op)
        if op == 2:
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(measured_module, "_runner", lambda _, op, __: lambda: run(op))
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    calls = measurement.first_calls()
    if kind == "cuda":
        next(calls)
        assert called == [0]
        assert len(list(calls)) == 2
        assert called == [0, 2, 3]  # the fused loss compiles when it is called: its kernels would not be built yet
    else:
        assert not list(calls)
        assert not called


def test_what_is_about_to_run_is_known_before_it_runs(tmp_path: Path) -> None:
    captured = step()
    first = Measurement(captured, cache=Cache(tmp_path))
    assert torch.ops.aten.addmm.default in first.targets
    first.run()
    assert not Measurement(captured, cache=Cache(tmp_path)).targets


def test_an_op_that_cannot_run_alone_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("not with these values")

    monkeypatch.setattr(measured_module, "_measure_op", fail)
    costs = measure_costs(step(), cache=Cache(tmp_path))
    assert sum(costs.op_time_ns) > 0


def test_a_broken_cache_is_a_cold_cache(tmp_path: Path) -> None:
    path = tmp_path / "op_costs_v1.json"
    for text in ("{", "[1, 2]", '{"a": "b"}', '{"a": [-1, 2]}', '{"a": [1.5, 2]}', "\x00"):
        path.write_text(text)
        assert Cache(tmp_path).get("cpu", "op") is None


def test_two_caches_merge(tmp_path: Path) -> None:
    one, two = Cache(tmp_path), Cache(tmp_path)
    one.put("cpu", "a", (1, 2))
    two.put("cpu", "b", (3, 4))
    one.save()
    two.save()
    again = Cache(tmp_path)
    assert again.get("cpu", "a") == (1, 2)
    assert again.get("cpu", "b") == (3, 4)
    assert len(json.loads((tmp_path / "op_costs_v1.json").read_text())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = Cache(blocked / "inside")
    cache.put("cpu", "a", (1, 2))
    cache.save()
    assert cache.get("cpu", "a") == (1, 2)
