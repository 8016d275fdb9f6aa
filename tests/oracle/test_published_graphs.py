"""The published rematerialization graphs: known answers, and planners that must agree with each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.capture.node_link import load_node_link
from memfit.core.outcome import Outcome, Status
from memfit.planning import plan

DATA = Path(__file__).parents[2] / "../shared/data/remat"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not here")


def _plan(name: str, fraction: float, planner: str, seconds: float = 20.0) -> tuple[Outcome, float | None]:
    """The outcome and its overhead in percent."""
    graph, costs = load_node_link(DATA / f"{name}.json")
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline
    outcome = plan(graph, costs, int(whole.peak_bytes * fraction), planner=planner, time_limit_s=seconds)
    if outcome.plan is None:
        return outcome, None
    assert outcome.plan.timeline.peak_bytes <= int(whole.peak_bytes * fraction)
    assert outcome.lower_bound_ns <= outcome.plan.timeline.time_ns
    return outcome, 100 * (outcome.plan.timeline.time_ns / whole.time_ns - 1)


@needs_data
def test_known_answers_at_80_percent() -> None:
    """Known optima for step order: fcn8 +0.138 %, layered_n100 +2.296 %; a free order can only be better."""
    _, fcn8 = _plan("fcn8_b32", 0.8, "cut_lp")
    assert fcn8 is not None
    assert fcn8 == pytest.approx(0.136, abs=0.003)
    _, layered = _plan("layered_n100", 0.8, "cut_lp")
    assert layered is not None
    assert layered <= 2.296
    outcome, _ = _plan("vgg16_b256", 0.8, "cut_lp")
    assert outcome.status is Status.INFEASIBLE
    assert "must coexist" in outcome.reason


@needs_data
@pytest.mark.parametrize(("name", "fraction", "optimum"), [("vgg16_b256", 0.9, 1.968), ("unet_b32", 0.9, 1.129), ("unet_b32", 0.8, 1.984)])
def test_the_cut_lp_equals_cp_sat(name: str, fraction: float, optimum: float) -> None:
    pytest.importorskip("ortools")
    _, ours = _plan(name, fraction, "cut_lp")
    outcome, theirs = _plan(name, fraction, "cp_sat", 60.0)
    assert ours is not None
    assert theirs is not None
    assert "optimal" in outcome.reason
    assert ours == pytest.approx(theirs, abs=1e-6) == pytest.approx(optimum, abs=1e-3)


@needs_data
@pytest.mark.slow
def test_checkmate_agrees() -> None:
    outcome, overhead = _plan("vgg16_b256", 0.9, "checkmate", 300.0)
    assert "optimal" in outcome.reason
    assert overhead == pytest.approx(1.968, abs=1e-3)


@needs_data
@pytest.mark.parametrize("name", ["vgg16_b256", "fcn8_b32", "unet_b32", "resnet50_b256"])
def test_auto_is_close_to_its_bound(name: str) -> None:
    for fraction in (0.9, 0.7, 0.5):
        outcome, overhead = _plan(name, fraction, "cut_lp")
        assert outcome.status is Status.INFEASIBLE or overhead is not None
        if overhead is not None:
            assert outcome.gap_fraction is not None
            assert outcome.gap_fraction < 0.012, (name, fraction)
