from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core import InfeasibleBudget
from memfit.core.io import load

KEYS = {"status", "total_cost", "lower_bound", "num_forward", "num_backward", "writes", "reads", "seconds"}


def run(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["checkpoint", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    data: dict[str, object] = json.loads(result.stdout)
    assert set(data) >= KEYS
    return data


def test_fields_add_up() -> None:
    data = run("--steps", "30", "--slots", "3,4", "--forward-cost", "1", "--backward-cost", "2", "--write", "0,3", "--read", "0,2")
    assert data["status"] == "OPTIMAL"
    assert data["judged"] is True
    writes, reads = data["writes"], data["reads"]
    assert isinstance(writes, list)
    assert isinstance(reads, list)
    assert data["total_cost"] == data["num_forward"] + 2 * 31 + 3 * writes[1] + 2 * reads[1]
    assert data["total_cost"] == data["lower_bound"]


def test_slides() -> None:
    assert run("--steps", "5", "--slots", "2")["num_forward"] == 8
    assert run("--steps", "5", "--slots", "1")["num_forward"] == 15
    assert run("--steps", "5", "--slots", "5", "--algorithm", "store-all")["num_forward"] == 5


def test_bytes_and_unlimited() -> None:
    assert run("--steps", "9", "--capacity", "3KiB", "--state", "1KiB")["total_cost"] == run("--steps", "9", "--slots", "3")["total_cost"]
    assert run("--steps", "9", "--slots", "inf")["num_forward"] == 9


def test_infeasible_prints_json_and_proves() -> None:
    result = CliRunner().invoke(app, ["checkpoint", "--steps", "5", "--slots", "0,0", "--json"])
    assert json.loads(result.stdout)["status"] == "INFEASIBLE"
    assert isinstance(result.exception, InfeasibleBudget)
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "checkpoint", "--steps", "5", "--slots", "0"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    assert done.returncode == 3
    assert "at least 1 slot" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "5"],
        ["--steps", "5", "--slots", "banana"],
        ["--steps", "5", "--slots", "2", "--write", "1,2"],
        ["--steps", "5", "--slots", "2", "--read", "x"],
        ["--steps", "five", "--slots", "2"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["checkpoint", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [["--steps", "-1", "--slots", "2"], ["--steps", "3", "--slots", "-2"], ["--steps", "3", "--slots", "2", "--write", "-1"]]
)
def test_bad_values(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["checkpoint", *arguments]).exit_code == 1


def test_table_and_files(tmp_path: Path) -> None:
    picture, plan = tmp_path / "a.png", tmp_path / "a.json"
    base = ["checkpoint", "--steps", "12", "--slots", "2,2", "--write", "0,1", "--read", "0,1"]
    shown = CliRunner().invoke(app, [*base, "-o", str(picture)])
    assert "each runs" in shown.stdout
    assert "x12 │" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(app, [*base, "-o", str(picture)]).exit_code == 1
    assert CliRunner().invoke(app, [*base, "-o", str(plan)]).exit_code == 0
    assert type(load(plan)).__name__ == "Plan"
    assert CliRunner().invoke(app, [*base, "-o", str(tmp_path / "a.gif")]).exit_code == 1
