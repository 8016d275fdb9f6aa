from __future__ import annotations

import numpy as np

from memfit.chain import Chain, StorageLevel, plan_hrevolve, plan_revolve, single_level
from memfit.chain.spacetime import Trace, trace
from memfit.report.spacetime import MAX_LINES, _thin_out, spacetime_png, spacetime_text


def parts(path: Trace) -> dict[str, object]:
    return {"num_steps": path.num_steps, "total_time": path.total_time, "advances": path.advances, "backs": path.backs, "kept": path.kept}


def test_trace_follows_the_cost() -> None:
    chain = Chain(num_steps=20, levels=(StorageLevel(slots=2), StorageLevel(slots=2, write_cost=3, read_cost=2)), backward_cost=2)
    plan = plan_hrevolve(chain)
    path = trace(plan)
    assert path.total_time == plan.cost
    assert len(path.backs) == 21
    assert len(path.kept) == sum(plan.counts().writes)
    assert (path.kept[:, 3] > path.kept[:, 2]).all()


def test_text_shows_the_first_sweep_and_the_levels() -> None:
    text = spacetime_text(**parts(trace(plan_revolve(single_level(10, 2)))))  # type: ignore[arg-type]
    assert text.splitlines()[0].startswith("x10 │")
    assert "0·" in text
    assert text.count("■") >= 8


def test_png_and_degenerate_chains() -> None:
    for steps in (0, 1, 30):
        path = trace(plan_revolve(single_level(steps, 3)))
        assert spacetime_png(**parts(path), title="t").startswith(b"\x89PNG")  # type: ignore[arg-type]
        assert "time" in spacetime_text(**parts(path))  # type: ignore[arg-type]


def test_long_pictures_are_thinned() -> None:
    assert len(_thin_out(np.zeros((5 * MAX_LINES + 1, 4)))) <= MAX_LINES
