"""The example of `fit` runs as it is shown, inside its budget, with the plain model's losses."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_in_a_budget.py"


def test_it_trains_inside_the_budget_with_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    assert main(["--steps", "3", "--batch", "8", "--size", "24"]) == 0
    printed = capsys.readouterr().out
    assert "step 2" in printed
    assert "measured" in printed
