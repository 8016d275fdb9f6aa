"""Plans and frontiers made on the command line, and run by `fit` and `memfit run` without a solver."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import memfit
from memfit.cli import main
from memfit.planning import api as door

torch.set_num_threads(1)

FACTORY = """
import torch
from torch import nn

def build(rows=64):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)), nn.Linear(32, 5))
    return model, (torch.randn(rows, 32),), nn.functional.cross_entropy, (torch.randint(0, 5, (rows,)),)

def other():
    return build(48)

def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(4)), nn.Flatten(), nn.Linear(256, 2))
    return model, (torch.randn(8, 4, 8, 8),), nn.functional.cross_entropy, (torch.randint(0, 2, (8,)),)
"""

WORDS = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (8, 64))
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 300, bias=False), nn.Flatten(0, 1))
    return model, (tokens,), nn.functional.cross_entropy, (tokens.flatten(),)
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    (tmp_path / "nets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["memfit", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def _training() -> tuple[torch.nn.Module, Any, Any, torch.optim.Optimizer]:
    space: dict[str, Any] = {}
    exec(FACTORY, space)
    model, inputs, _, targets = space["build"]()
    return model, inputs, targets, torch.optim.AdamW(model.parameters())


def _fit(plan: Any, budget: int | str) -> Any:
    model, inputs, targets, optimizer = _training()
    return memfit.fit(
        model, inputs, budget=budget, optimizer=optimizer, loss_fn=functional.cross_entropy, example_targets=targets, plan=plan
    )


@pytest.fixture
def no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every planner but keep-all refuses to work."""
    monkeypatch.setattr(door, "PLANNERS", {"keep_all": door.PLANNERS["keep_all"]})


@pytest.fixture
def plan_file(run: Run, tmp_path: Path) -> Path:
    code, out, err = run(
        "plan", "nets.py:build", "--budget-fraction", 0.75, "--time-limit", 1, "--device", "h200", "-o", "plan.json", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["peak_bytes"] <= json.loads(out)["budget_bytes"] < json.loads(out)["keep_all_peak_bytes"]
    assert "next: memfit run nets.py:build --plan plan.json" in err
    return tmp_path / "plan.json"


def test_a_saved_plan_runs_without_a_solver(run: Run, plan_file: Path, no_solver: None) -> None:
    saved = memfit.load(plan_file)
    assert isinstance(saved, memfit.Plan)
    fitted = _fit(str(plan_file), saved.budget.device_bytes or 0)
    assert fitted.plan.schedule == saved.schedule
    model, inputs, targets, _ = _training()
    loss, plain = fitted(*inputs, *targets), functional.cross_entropy(model(*inputs), *targets)
    loss.backward()
    plain.backward()
    assert torch.equal(loss, plain)
    for ours, theirs in zip(fitted.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    report = fitted.report()
    assert report.measured_peak_bytes <= report.budget_bytes == saved.budget.device_bytes

    code, out, err = run("run", "nets.py:build", "--plan", plan_file, "--json", "--steps", 2)
    assert code == 0, err
    assert json.loads(out)["budget_bytes"] == saved.budget.device_bytes
    assert json.loads(out)["planner"] == "auto"


def test_a_plan_of_another_model_shape_or_step_is_refused_in_a_sentence(run: Run, plan_file: Path) -> None:
    for arguments in (("nets.py:other",), ("nets.py:convolutions",), ("nets.py:build", "--optimizer", "sgd")):
        code, _, err = run("run", *arguments, "--plan", plan_file, "--budget", "1GiB")
        assert code == 1
        assert err.startswith("BadInput: the plan is for graph")
        assert "Plan again with memfit plan" in err
        assert len(err.splitlines()) == 1
    saved = memfit.load(plan_file)
    assert isinstance(saved, memfit.Plan)
    broken = replace(saved, schedule=memfit.Schedule(steps=saved.schedule.steps[1:]))
    with pytest.raises(memfit.IllegalSchedule):
        _fit(broken, "1GiB")
    text = plan_file.read_text().replace('"version":1', '"version":99')
    plan_file.write_text(text)
    with pytest.raises(memfit.BadInput, match="version 99 is not the version 1"):
        _fit(plan_file, "1GiB")


def test_below_the_plain_minimum_the_loss_in_chunks_is_planned_saved_and_run(run: Run, tmp_path: Path) -> None:
    """What `fit` would fall back on, `memfit plan` does too: a refusal must hold for every form of the step."""
    (tmp_path / "words.py").write_text(WORDS)
    code, out, err = run("plan", "words.py:build", "--budget", "1kB", "--device", "cpu", "--time-limit", 1, "--json")
    assert code == 3, err
    least = json.loads(out)["lower_bound_bytes"]
    code, out, err = run(
        "plan", "words.py:build", "--budget", int(1.3 * least), "--device", "cpu", "--time-limit", 2, "-o", "plan.json", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["peak_bytes"] < 2 * 8 * 64 * 300 * 4  # logits and their gradient never exist whole together
    code, out, err = run("run", "words.py:build", "--plan", "plan.json", "--steps", 1, "--json")
    assert code == 0, err
    assert json.loads(out)["measured_peak_bytes"] <= int(1.3 * least)
    code, out, err = run("report", "plan.json", "words.py:build", "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["inside"]


def test_gradients_that_are_there_already_are_refused(plan_file: Path) -> None:
    """A step that adds to gradients is another graph: the plan would be left out silently."""
    model, inputs, targets, optimizer = _training()
    functional.cross_entropy(model(*inputs), *targets).backward()
    options = {"loss_fn": functional.cross_entropy, "example_targets": targets, "optimizer": optimizer}
    with pytest.raises(memfit.BadInput, match="zero_grad"):
        memfit.fit(model, inputs, budget="1GiB", plan=plan_file, **options)


def test_what_the_process_holds_besides_is_taken_off_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU libraries keep workspaces: the file has the budget that was asked for, and `fit` takes them off again."""
    monkeypatch.setattr("memfit.pipeline.prepare.count_held_elsewhere", lambda *_: 30_000)
    monkeypatch.setattr("memfit.pipeline.prepare.count_slack", lambda *_: 20_000)
    code, _, err = run("plan", "nets.py:build", "--budget", "400kB", "--time-limit", 2, "-o", "plan.json")
    assert code == 0, err
    saved = memfit.load("plan.json")
    assert isinstance(saved, memfit.Plan)
    assert saved.budget.device_bytes == 400_000
    assert saved.timeline.peak_bytes <= 350_000
    code, out, err = run("run", "nets.py:build", "--plan", "plan.json", "--steps", 1, "--json")
    assert code == 0, err
    assert json.loads(out)["budget_bytes"] == 400_000


def test_a_plan_that_does_not_fit_here_says_what_it_needs(run: Run, plan_file: Path) -> None:
    saved = memfit.load(plan_file)
    assert isinstance(saved, memfit.Plan)
    with pytest.raises(memfit.BadInput, match=r"the plan holds .* on this device \(cpu-1; .* where it was made\).*larger budget"):
        _fit(saved, saved.timeline.peak_bytes - 1)


def test_a_plan_made_for_another_device_is_judged_with_the_workspaces_measured_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A roofline for another device knows nothing of this one's library workspaces: the plan may not fit here, and that is said."""
    files = ("-o", "p.json", "--save-graph", "g.json", "--save-costs", "c.json")
    code, _, err = run("plan", "nets.py:convolutions", "--budget-fraction", 1, "--device", "t4", "--planner", "keep_all", *files)
    assert code == 0, err
    assert run("simulate", "g.json", "p.json", "--costs", "c.json")[0] == 0
    costs = memfit.load("c.json")
    assert isinstance(costs, memfit.Costs)
    assert costs.device == "t4"
    more = tuple(size + 2**20 for size in costs.workspace_bytes)
    monkeypatch.setattr("memfit.pipeline.costs._costs", lambda *_: replace(costs, workspace_bytes=more, device="greedy-cpu"))
    code, _, err = run("run", "nets.py:convolutions", "--plan", "p.json", "--steps", 1)
    assert code == 1
    assert "on this device (greedy-cpu; " in err
    assert "its ops need other workspaces here" in err


def test_frontier_of_a_model_is_monotone_and_its_plans_fit() -> None:
    model, inputs, targets, optimizer = _training()
    found = memfit.frontier(
        model,
        inputs,
        loss_fn=functional.cross_entropy,
        example_targets=targets,
        optimizer=optimizer,
        device="h200",
        num_points=4,
        time_limit_s=2,
    )
    solved = [p for p in found.points if p.plan is not None]
    assert len(solved) >= 2
    assert solved[-1].peak_bytes == found.keep_all_peak_bytes
    for smaller, larger in pairwise(solved):
        assert (larger.time_ns or 0) <= (smaller.time_ns or 0)
        assert (smaller.peak_bytes or 0) <= (larger.peak_bytes or 0)
    chosen = solved[0]
    fitted = _fit(chosen.plan, chosen.budget_bytes)
    fitted(*inputs, *targets).backward()
    assert fitted.report().measured_peak_bytes <= chosen.budget_bytes


def test_frontier_command(run: Run, tmp_path: Path) -> None:
    arguments = ("frontier", "nets.py:build", "--device", "h200", "--fractions", "0.7,1", "--time-limit", 1)
    code, out, err = run(*arguments, "--json", "--png", "f.png", "-o", "f.json")
    assert code == 0, err
    assert json.loads(out) == json.loads((tmp_path / "f.json").read_text())
    assert [p["status"] for p in json.loads(out)["points"]][-1] == "OPTIMAL"
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert "Wrote f.png; next: memfit plan nets.py:build --budget" in err
    code, _, err = run(*arguments, "--png", "f.png")
    assert (code, "f.png exists" in err) == (1, True)
    files = ("--save-graph", "g.json", "--save-costs", "c.json")
    assert run("plan", "nets.py:build", "--budget", "1GiB", "--device", "h200", "--time-limit", 0, *files)[0] == 0
    code, out, err = run("frontier", "g.json", "--costs", "c.json", "--points", 3, "--planner", "greedy")
    assert code == 0, err
    assert "proven for the step as it is traced" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("frontier", "nets.py:build", "--fractions", "banana"), 1, "fractions 'banana' cannot be read"),
        (("frontier", "nets.py:build", "--fractions", "-1", "--device", "h200"), 1, "no shares of the keep-all peak"),
        (("frontier", "nets.py:build", "--device", "banana"), 1, "device 'banana' is not known"),
        (("frontier", "missing.json"), 1, "cannot be read"),
        (("frontier", "nets.py:build", "--points", "0"), 2, "--points"),
        (("frontier", "nets.py:build", "--costs", "c.json"), 1, "leave --costs out"),
        (("plan", "nets.py:banana", "--budget", "1GiB"), 1, "has no function 'banana'"),
        (("plan", "nets.py:build", "--budget", "1kB", "--device", "h200"), 3, "proven minimum"),
        (("plan", "nets.py:build", "--budget", "banana", "--device", "h200"), 1, "budget 'banana' cannot be read"),
        (("run", "nets.py:build"), 2, "--budget"),
        (("run", "nets.py:build", "--plan", "missing.json"), 1, "cannot be read"),
    ],
)
def test_bad_arguments(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    found, _, err = run(*arguments)
    assert found == code, err
    assert message in err
