"""`memfit simulate` and the rules every command keeps: exit codes, stdout for data, stderr for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.small import chain
from typer.testing import CliRunner, Result

import memfit
from memfit.cli import app, main
from memfit.core.costs import Costs, Level
from memfit.core.errors import MemfitError
from memfit.core.io import load, save
from memfit.core.plan import Plan
from memfit.core.schedule import Compute, Free, Offload, Schedule


@pytest.fixture
def files(tmp_path: Path) -> Path:
    graph = chain(2)
    save(graph, tmp_path / "graph.json")
    save(Schedule(steps=(Compute(0), Free(0), Compute(1))), tmp_path / "schedule.json")
    save(Schedule(steps=(Compute(1),)), tmp_path / "illegal.json")
    save(Schedule(steps=(Compute(0), Offload(0), Free(0), Compute(1))), tmp_path / "offload.json")
    level = Level(write_latency_ns=50)
    save(Costs(op_time_ns=(5, 6), workspace_bytes=(100, 0), levels=(level,), graph_digest=graph.digest), tmp_path / "costs.json")
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_legal_schedule(files: Path) -> None:
    result = run("simulate", files / "graph.json", files / "schedule.json")
    assert result.exit_code == 0
    assert "20 B (20 bytes) at step 0, op 0 (f0)" in result.stdout
    assert "3 (2 computes, 2 ops)" in result.stdout
    assert result.stderr == ""


def test_costs_bring_workspace_and_time(files: Path) -> None:
    result = run("simulate", files / "graph.json", files / "schedule.json", "--costs", files / "costs.json", "--json")
    data = json.loads(result.stdout)
    assert data == {
        "status": "LEGAL",
        "num_steps": 3,
        "num_computes": 2,
        "num_ops": 2,
        "peak_bytes": 120,
        "peak_step": 0,
        "peak_at": "step 0, op 0 (f0)",
        "bytes_by_kind_at_peak": {
            "parameter": 0,
            "gradient": 0,
            "optimizer": 0,
            "input": 10,
            "buffer": 0,
            "activation": 10,
            "temporary": 100,
        },
        "time_ns": 11,
        "serial_time_ns": 11,
        "level_peak_bytes": [120, 0],
    }


def test_an_illegal_schedule(files: Path) -> None:
    result = run("simulate", files / "graph.json", files / "illegal.json")
    assert isinstance(result.exception, MemfitError)
    assert result.stdout == ""
    told = run("simulate", files / "graph.json", files / "illegal.json", "--json")
    assert json.loads(told.stdout) == {
        "status": "ILLEGAL",
        "step": 0,
        "cause": "op 1 (f1) reads tensor 1 of storage 1, which was never computed",
    }


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--budget", "19"], "the device holds 20 B"),
        (["--budget", "0"], "the sources alone"),
        (["--budget", "banana"], "budget 'banana' cannot be read"),
        (["--budget", "-1"], "is negative"),
        (["--host-budget", "9"], "the host holds 10 B"),
        (["--host-budget", "banana"], "host budget 'banana'"),
        (["--disk-budget", "banana"], "disk budget 'banana'"),
    ],
)
def test_budgets_of_every_level_count(files: Path, options: list[str], complaint: str) -> None:
    costs = replace(load(files / "costs.json"), workspace_bytes=(0, 0))  # type: ignore[type-var]
    save(costs, files / "costs.json", force=True)
    result = run("simulate", files / "graph.json", files / "offload.json", "--costs", files / "costs.json", *options)
    assert complaint in str(result.exception)


def test_a_budget_that_is_enough(files: Path) -> None:
    assert run("simulate", files / "graph.json", files / "schedule.json", "--budget", "20").exit_code == 0


def test_output_is_a_plan_that_can_be_judged_again(files: Path) -> None:
    plan = files / "plan.json"
    result = run("simulate", files / "graph.json", files / "schedule.json", "--budget", "1kB", "-o", plan)
    assert result.exit_code == 0
    assert f"Wrote {plan}; next: memfit simulate" in result.stderr
    saved = load(plan, Plan)
    assert isinstance(saved, Plan)
    assert saved.budget.device_bytes == 1000
    assert run("simulate", files / "graph.json", plan).stdout == run("simulate", files / "graph.json", files / "schedule.json").stdout


def test_a_plan_of_another_graph_is_refused(files: Path) -> None:
    run("simulate", files / "graph.json", files / "schedule.json", "-o", files / "plan.json")
    save(chain(3), files / "longer.json")
    result = run("simulate", files / "longer.json", files / "plan.json")
    assert f"belongs to graph {chain(2).digest[:12]}, not to {chain(3).digest[:12]}" in str(result.exception)


def test_an_existing_output_is_refused_before_the_work(files: Path) -> None:
    arguments = ("simulate", files / "graph.json", files / "schedule.json", "-o", files / "costs.json")
    before = (files / "costs.json").read_bytes()
    result = run(*arguments)
    assert "pass --force" in str(result.exception)
    assert result.stdout == ""
    assert (files / "costs.json").read_bytes() == before
    assert run(*arguments, "--force").exit_code == 0
    assert (files / "costs.json").read_bytes() != before


@pytest.mark.parametrize(
    ("graph", "schedule", "complaint"),
    [
        ("missing.json", "schedule.json", "cannot be read (No such file or directory)"),
        ("graph.json", "missing.json", "cannot be read"),
        ("schedule.json", "schedule.json", "holds a schedule, but a graph is expected"),
        ("graph.json", "graph.json", "holds a graph, but a schedule or a plan is expected"),
        (".", "schedule.json", "cannot be read (Is a directory)"),
    ],
)
def test_wrong_files(files: Path, graph: str, schedule: str, complaint: str) -> None:
    result = run("simulate", files / graph, files / schedule)
    assert complaint in str(result.exception)
    assert result.stdout == ""


def test_names_from_a_strangers_file_cannot_write_to_the_terminal(files: Path) -> None:
    graph = chain(1)
    save(replace(graph, digest="", ops=(replace(graph.ops[0], name="\x1b[2J\ud800\n"),)), files / "odd.json")
    save(Schedule(steps=(Compute(0),)), files / "one.json")
    result = run("simulate", files / "odd.json", files / "one.json")
    assert result.exit_code == 0
    assert "\\x1b[2J\\ud800\\n" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["simulate"], ["banana"], ["simulate", "a", "b", "--banana"], ["--banana"]])
def test_usage_errors_are_two(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == (0 if not arguments and result.stdout else 2)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"memfit {memfit.__version__}\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (memfit.BadInput("x"), 1),
        (memfit.IllegalSchedule(0, "x"), 1),
        (memfit.InfeasibleBudget("x"), 3),
        (memfit.NoPlanFound("x"), 4),
        (memfit.Unsupported("x"), 1),
    ],
    ids=lambda x: str(type(x).__name__),
)
def test_exit_codes(error: MemfitError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("memfit.cli.app", fail)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{type(error).__name__}: {error}\n"


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memfit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_as_a_real_process(files: Path) -> None:
    source = {"PYTHONPATH": str(Path(memfit.__file__).parents[1])}
    good = process("simulate", files / "graph.json", files / "schedule.json", "--json", **source)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["peak_bytes"] == 20
    bad = process("simulate", files / "graph.json", files / "illegal.json", **source)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("IllegalSchedule: illegal schedule at step 0: op 1 (f1) reads tensor 1")
    assert bad.stderr.count("\n") == 1
    assert process("simulate", **source).returncode == 2


def test_the_addresses_of_a_plan_are_judged(tmp_path: Path) -> None:
    from memfit.planning import plan

    graph = chain(4)
    save(graph, tmp_path / "graph.json")
    planned = plan(graph, planner="keep_all").require_plan()
    assert planned.layout is not None
    save(planned, tmp_path / "plan.json")
    assert CliRunner().invoke(app, ["simulate", str(tmp_path / "graph.json"), str(tmp_path / "plan.json")]).exit_code == 0
    clashing = replace(planned, layout=replace(planned.layout, offsets=(0,) * len(planned.layout.offsets)))
    save(clashing, tmp_path / "clash.json")
    refused = CliRunner().invoke(app, ["simulate", str(tmp_path / "graph.json"), str(tmp_path / "clash.json")])
    assert "share addresses" in str(refused.exception)
