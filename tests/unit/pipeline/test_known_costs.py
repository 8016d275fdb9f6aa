"""What is known of ops from earlier measurements: kept on disk, asked before anything is compiled or measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import batch, deep

from memfit.capture.inputs import Call
from memfit.pipeline.capture import capture
from memfit.pipeline.costs import measure_costs
from memfit.pipeline.known_costs import Cache, StepCosts
from memfit.profile import measure as measured_module


def step() -> Any:
    return capture(deep(), Call.flatten((batch()[0],), {}))


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


def test_what_is_about_to_run_is_known_before_it_runs(tmp_path: Path) -> None:
    captured = step()
    missing = StepCosts(captured, Cache(tmp_path)).missing()
    assert torch.ops.aten.addmm.default in [captured.call(*form).target for form in missing]
    measure_costs(captured, cache=Cache(tmp_path))
    assert not StepCosts(captured, Cache(tmp_path)).missing()


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
