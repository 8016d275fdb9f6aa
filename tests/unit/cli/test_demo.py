"""`memfit demo` end to end, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.errors import BadInput

RUN = ["demo", "--engine", "numpy", "--depths", "3,8", "--steps", "3"]


def test_the_demo_shows_modes_that_agree_and_writes_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    result = CliRunner().invoke(app, [*RUN, "-o", str(picture), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    rows = {row["name"]: row for row in data["modes"]}
    assert {"naive", "exact", "pool", "static", "arena", "sqrt", "planned"} <= set(rows)
    assert all(row["exact"] and row["same_numbers"] and row["predicted_bytes"] == row["measured_bytes"] for row in rows.values())
    assert rows["sqrt"]["measured_bytes"] < rows["exact"]["measured_bytes"] < rows["naive"]["measured_bytes"]
    assert rows["planned"]["measured_bytes"] <= rows["sqrt"]["measured_bytes"]
    assert data["same_losses"]
    assert {(p["net"], p["depth"]) for p in data["points"]} == {(n, d) for n in ("residual MLP", "LSTM") for d in (3, 8)}
    assert all(p["predicted_bytes"] == p["measured_bytes"] for p in data["points"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, [*RUN, "-o", str(picture)])
    assert isinstance(again.exception, BadInput)
    assert "--force" in str(again.exception)


@pytest.mark.parametrize("depths", ["banana", "", "0,5", "10,5000", "3.5"])
def test_bad_depths_are_refused(depths: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--engine", "numpy", "--depths", depths])
    assert isinstance(result.exception, BadInput)
