"""The schedules that ship with the package still belong to their models, are legal, hold what they say, and run without a solver."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit import schedules
from memfit.pipeline.study import study
from memfit.schedules.__main__ import main, make

SAME_TORCH = torch.__version__.split("+")[0] == schedules.index()["small_gpt"]["torch"]
needs_its_torch = pytest.mark.skipif(not SAME_TORCH, reason="made for another torch version: python -m memfit.schedules --write")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def captured(name: str) -> Any:
    model, inputs, loss_fn, targets = schedules.example(name)
    return study(model, inputs, loss_fn=loss_fn, example_targets=targets, device="cpu")


@needs_its_torch
@pytest.mark.parametrize("name", schedules.names())
def test_a_fresh_capture_is_the_graph_it_was_made_for(name: str) -> None:
    studied, plan, about = captured(name), memfit.load(schedules.path(name)), schedules.index()[name]
    assert plan.graph_digest == studied.captured.graph.digest
    timeline = memfit.simulate(studied.captured.graph, plan.schedule, studied.costs)
    assert timeline.peak_bytes == about["peak_bytes"] <= about["budget_bytes"]
    assert about["peak_bytes"] < 0.52 * about["keep_all_peak_bytes"]


@needs_its_torch
@pytest.mark.parametrize("name", schedules.names())
def test_it_runs_without_a_solver_and_gives_the_plain_gradients(name: str) -> None:
    model, inputs, loss_fn, targets = schedules.example(name)
    twin = copy.deepcopy(model)
    about = schedules.index()[name]
    fitted = memfit.fit(  # costs by table: measuring a busy machine is no part of this
        model, inputs, budget=about["budget_bytes"], loss_fn=loss_fn, example_targets=targets, plan=schedules.path(name), device="cpu"
    )
    assert fitted.plan.schedule == memfit.load(schedules.path(name)).schedule
    torch.manual_seed(3)
    fitted(*inputs, *targets).backward()
    torch.manual_seed(3)
    loss_fn(twin(*inputs), *targets).backward()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


def test_another_model_is_refused_in_a_sentence() -> None:
    model, inputs, loss_fn, targets = schedules.example("small_resnet")
    with pytest.raises(memfit.BadInput, match="Plan again"):
        memfit.fit(model, inputs, budget="1GiB", loss_fn=loss_fn, example_targets=targets, plan=schedules.path("small_gpt"), device="cpu")
    with pytest.raises(memfit.BadInput, match="small_gpt"):
        schedules.path("banana")


def test_they_can_be_made_again(tmp_path: Path) -> None:
    about = make("small_resnet", tmp_path)
    again = memfit.load(tmp_path / "small_resnet.json")
    assert again.timeline.peak_bytes <= about["budget_bytes"]
    assert json.loads(json.dumps(about)) == about
    if SAME_TORCH:
        shipped = schedules.index()["small_resnet"]
        assert about["keep_all_peak_bytes"] == shipped["keep_all_peak_bytes"]
        assert abs(about["overhead_fraction"] - shipped["overhead_fraction"]) < 0.02


def test_the_list_names_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    text = capsys.readouterr().out
    assert all(f"{name}: memfit.schedules:" in text for name in schedules.names())
    main(["--path", "small_gpt"])
    assert capsys.readouterr().out.strip().endswith("small_gpt.json")
