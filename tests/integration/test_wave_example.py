"""The wave-equation example: its gradient is right, it stays inside its budget, and descent lowers the misfit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "wave_adjoint.py"


def test_example_runs_and_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:

    module = runpy.run_path(str(EXAMPLE), run_name="example")
    code = module["main"](["--size", "24", "--steps", "90", "--budget", "150kB", "--disk", "200kB", "--iterations", "2"])
    assert code == 0
    assert "relative error" in capsys.readouterr().out


def test_gradient_is_the_same_with_all_memory() -> None:
    module = runpy.run_path(str(EXAMPLE), run_name="example")
    wave = module["Wave"](20, 70)
    wave.records = wave.record(module["true_medium"](20))
    guess = module["true_medium"](20) * 0.9
    plenty, _ = wave.gradient(guess, budget="1GB")
    little, run = wave.gradient(guess, budget=14 * guess.nbytes, disk="1MB")
    assert (plenty == little).all()
    assert run.peak_bytes <= 14 * guess.nbytes
    assert module["check_gradient"](wave, guess, little) < 1e-6
