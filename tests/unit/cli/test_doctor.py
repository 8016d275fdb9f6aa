"""`memfit doctor`: the screen, the fields, the file it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memfit.cli import main

NET = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5000))
        x, y = torch.empty(512, 64), torch.empty(512, dtype=torch.long)
    return model, (x,), nn.functional.cross_entropy, (y,)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["memfit", "doctor", *map(str, arguments), "--time-limit", "0.2"])
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise


def test_the_screen_names_the_pass_and_the_next_budget(
    net: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, f"{net}:build", "--budget", "1MiB")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("budget   1.00 MiB (1048576 bytes): BELOW THE MINIMUM")
    assert any(line.startswith("reached") for line in lines)
    assert any(line.split()[0] == "chunked-loss" and "->" in line for line in lines)
    assert len(lines) <= 40


def test_json_and_a_file_that_is_not_overwritten(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "found.json"
    run(monkeypatch, f"{net}:build", "--optimizer", "sgd", "--json", "-o", target)
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(target.read_text()) == printed
    assert printed["fixed"]["optimizer"] == 0
    assert sum(row["size_bytes"] for row in printed["held"]) == printed["minimum_bytes"]
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, f"{net}:build", "-o", target)
    assert stop.value.code == 1
    assert "--force" in capsys.readouterr().err
    target.write_text("mine")
    run(monkeypatch, f"{net}:build", "-o", target, "--force")
    assert json.loads(target.read_text())["minimum_bytes"] > printed["minimum_bytes"]  # AdamW's state


def test_what_is_not_allowed_is_said(net: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, f"{net}:build", "--allow", "recompute", "--json")
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["passes"] if row["name"] == "chunked-loss")
    assert "not allowed" in row["note"]
    assert row["after_bytes"] < found["minimum_bytes"] == found["as_it_is_bytes"]
    with pytest.raises(SystemExit):
        run(monkeypatch, f"{net}:build", "--allow", "wings")
    assert "wings" in capsys.readouterr().err
