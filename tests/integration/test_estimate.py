"""`memfit.estimate` and `memfit estimate`: the numbers add up, hold on a real step, and nothing is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.training import deep, held_bytes, peak_bytes
from torch import nn
from torch.nn import functional

import memfit
from memfit.cli import main
from memfit.profile import devices
from memfit.profile.devices import Device, register

ROWS = 128


def _step() -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer]:
    model = deep(width=32, depth=5)
    return model, torch.randn(ROWS, 32), torch.randint(0, 5, (ROWS,)), torch.optim.AdamW(model.parameters())


def test_the_numbers_add_up() -> None:
    model, x, y, optimizer = _step()
    found = memfit.estimate(model, (x,), loss_fn=functional.cross_entropy, example_targets=(y,), optimizer=optimizer, time_limit_s=2)
    assert sum(found.by_kind.values()) == found.peak_bytes
    assert found.smallest_bytes is not None
    assert found.proven_minimum_bytes <= found.smallest_bytes <= found.peak_bytes
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert found.by_kind["parameter"] == parameters
    assert (
        2 * parameters <= found.by_kind["optimizer"] <= 2 * parameters + 8 * len(list(model.parameters()))
    )  # two moments and a step count
    sizes = [x.size_bytes for x in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert json.loads(json.dumps(found.as_data()))["peak_bytes"] == found.peak_bytes


def test_it_is_what_the_plain_step_takes() -> None:
    """Without dropout: on a CPU plain PyTorch keeps its masks as floats, the traced step as bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(5)), nn.Linear(32, 5))
    _, x, y, _ = _step()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's state comes with the first one
    predicted = memfit.estimate(model, (x,), loss_fn=functional.cross_entropy, example_targets=(y,), optimizer=optimizer, time_limit_s=0.1)
    measured = peak_bytes(step, held_bytes(model, optimizer, x, y))
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


def test_near_the_smallest_budget_fit_has_a_plan_and_below_the_minimum_none() -> None:
    model, x, y, optimizer = _step()
    options = {"loss_fn": functional.cross_entropy, "example_targets": (y,), "optimizer": optimizer}
    found = memfit.estimate(model, (x,), **options, time_limit_s=3)
    assert found.smallest_bytes is not None
    budget = int(1.2 * found.smallest_bytes)  # its search had other costs, and more of them
    fitted = memfit.fit(model, (x,), budget=budget, **options, time_limit_s=5)
    fitted(x, y).backward()
    assert fitted.report().measured_peak_bytes <= budget < found.peak_bytes
    with pytest.raises(memfit.InfeasibleBudget):
        memfit.fit(model, (x,), budget=found.proven_minimum_bytes - 1, **options)


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "FITS"), (0.9, "FITS WITH MEMFIT"), (0.01, "DOES NOT FIT")])
def test_verdicts_for_a_model_that_is_nowhere(share: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEVICES", dict(devices.DEVICES))
    with torch.device("meta"):
        model, x, y, optimizer = _step()
    options = {"loss_fn": functional.cross_entropy, "example_targets": (y,), "optimizer": optimizer}
    peak = memfit.estimate(model, (x,), **options, time_limit_s=0.1).peak_bytes
    register(
        Device(
            name="tiny", memory_bytes=int(share * peak), memory_bytes_per_s=1e12, fp32_flops=1e13, half_flops=1e13, link_bytes_per_s=1e10
        )
    )
    found = memfit.estimate(model, (x,), **options, device="tiny", time_limit_s=2)
    assert found.verdict == verdict
    assert verdict in str(found)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny_net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.randn(4, 8),)\ndef wrong():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["memfit", "estimate", "tiny_net.py:build", "--json", "--optimizer", "none", "--time-limit", "0.1"])
    main_exit = _exit_code()
    data = json.loads(capsys.readouterr().out)
    assert main_exit == 0
    assert data["by_kind"]["parameter"] == (8 * 8 + 8) * 4
    assert data["by_kind"]["optimizer"] == 0
    for name, message in (
        ("tiny_net.py:wrong", "the factory must return"),
        ("tiny_net.py", "does not name a model"),
        ("no.py:x", "no such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["memfit", "estimate", name])
        assert _exit_code() == 1
        assert message in capsys.readouterr().err


def _exit_code() -> int:
    try:
        main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0
