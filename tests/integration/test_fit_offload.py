"""Training with values that wait on the host: the plain model's gradients, the promised bytes, and a budget below what recomputation reaches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import NO_LIMIT, batch, deep, held_bytes, peak_bytes, same, twin
from torch import nn
from torch.nn import functional

import memfit
from memfit.cli import main
from memfit.core.schedule import Offload, Reload

FACTORY = """
import torch
from tests.training import batch, deep

def build():
    x, y = batch(rows=512, width=64)
    return deep(width=64, depth=8, dropout=0.0), (x,), torch.nn.functional.cross_entropy, (y,)
"""
ALLOW = ("recompute", "offload")


def sends(fitted: Any) -> int:
    steps = fitted.plan.schedule.steps
    assert sum(isinstance(s, Reload) for s in steps) >= sum(isinstance(s, Offload) for s in steps)
    return sum(isinstance(s, Offload) for s in steps)


def fitted_at(model: nn.Module, x: torch.Tensor, y: torch.Tensor, fraction: float, **options: Any) -> Any:
    given = {"loss_fn": functional.cross_entropy, "example_targets": (y,), "time_limit_s": 3, **options}
    whole: Any = memfit.fit(model, (x,), budget=NO_LIMIT, **{**given, "planner": "keep_all"})
    return memfit.fit(model, (x,), budget=int(fraction * whole.plan.timeline.peak_bytes), allow=ALLOW, **given)


def test_gradients_are_the_plain_models_and_bytes_the_promised_ones() -> None:
    model = deep(width=64, depth=8)
    x, y = batch(rows=512, width=64)
    other = twin(model)
    fitted = fitted_at(model, x, y, 0.6)
    assert sends(fitted) > 0
    torch.manual_seed(3)
    fitted(x, y).backward()
    torch.manual_seed(3)
    functional.cross_entropy(other(x), y).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert same(a.grad, b.grad)
    model.zero_grad(set_to_none=True)
    measured = peak_bytes(lambda: fitted(x, y).backward(), held_bytes(model, None, x, y))
    assert measured == fitted.plan.timeline.peak_bytes
    assert measured <= fitted.report().budget_bytes


def test_two_forwards_before_their_backwards_keep_apart() -> None:
    model = deep(width=64, depth=6, dropout=0.0)
    x, y = batch(rows=256, width=64)
    z, _ = batch(rows=256, width=64, seed=7)
    fitted = fitted_at(model, x, y, 0.65)
    assert sends(fitted) > 0
    other = twin(model)
    losses = [fitted(x, y), fitted(z, y)]
    expected = [functional.cross_entropy(other(x), y), functional.cross_entropy(other(z), y)]
    for loss in (*losses, *expected):
        loss.backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_a_compiled_step_offloads_too() -> None:
    pytest.importorskip("torch._inductor")
    model = deep(width=64, depth=6, dropout=0.0).double()
    x, y = batch(rows=256, width=64)
    x = x.double()
    other = twin(model)
    fitted = fitted_at(model, x, y, 0.65, engine="inductor")
    assert sends(fitted) > 0
    fitted(x, y).backward()
    functional.cross_entropy(other(x), y).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_a_saved_plan_with_offload_runs_without_a_solver(tmp_path: Any) -> None:
    model = deep(width=64, depth=6)
    x, y = batch(rows=256, width=64)
    fitted = fitted_at(model, x, y, 0.65)
    assert sends(fitted) > 0
    memfit.save(fitted.plan, tmp_path / "plan.json")
    again: Any = memfit.fit(
        twin(model),
        (x,),
        budget=fitted.report().budget_bytes,
        loss_fn=functional.cross_entropy,
        example_targets=(y,),
        plan=tmp_path / "plan.json",
    )
    assert again.plan.schedule == fitted.plan.schedule
    for one in (fitted, again):
        torch.manual_seed(5)
        one(x, y).backward()
    for a, b in zip(fitted.parameters(), again.parameters(), strict=True):
        assert same(a.grad, b.grad)


@pytest.mark.parametrize("allow", [("recompute", "ofload"), "recompute"])
def test_an_unknown_word_is_refused_with_the_known_ones(allow: Any) -> None:
    x, _ = batch()
    with pytest.raises(memfit.BadInput, match="offload"):
        memfit.fit(deep(), (x,), budget=NO_LIMIT, allow=allow)
    with pytest.raises(Exception, match="offload"):
        torch.compile(deep(), backend="memfit", options={"budget": NO_LIMIT, "allow": allow})(x)


def test_the_command_line_and_the_compile_door_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    model, x, y = deep(width=64, depth=8, dropout=0.0), *batch(rows=512, width=64)
    budget = int(0.6 * fitted_at(model, x, y, 1.0).plan.timeline.peak_bytes)
    arguments = ["--budget", str(budget), "--steps", "1", "--time-limit", "2", "--json", "--allow", "recompute", "--allow", "offload"]
    monkeypatch.setattr(sys, "argv", ["memfit", "run", "net.py:build", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["planner"] == "offload"
    assert report["measured_peak_bytes"] <= budget
    allowed = {"budget": budget, "allow": ("recompute", "offload"), "time_limit_s": 2, "reserve": "64KiB"}
    torch._dynamo.reset()
    compiled = torch.compile(deep(width=64, depth=8, dropout=0.0), backend="memfit", options=allowed)
    functional.cross_entropy(compiled(x), y).backward()
