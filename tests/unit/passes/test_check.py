"""The check between passes finds a step that does not hold together, and names the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.capture.inputs import Call
from memfit.passes.check import check_captured, check_rewritten
from memfit.passes.interface import Context, Level, Numbers, Pass, one_way
from memfit.passes.run import run_passes, watch_passes
from memfit.pipeline.capture import capture


@pytest.fixture(scope="module")
def step() -> Captured:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return capture(
        model, Call.flatten((torch.randn(3, 4), torch.zeros(3, dtype=torch.long)), {}), loss_fn=nn.functional.cross_entropy, num_targets=1
    )


def change_call(step: Captured, change: Callable[[OpCall], OpCall]) -> Captured:
    """The same step with the first call that reads a tensor changed."""
    at = next(i for i, c in enumerate(step.calls) if c.role is Role.CALL and any(isinstance(a, Ref) for a in c.args))
    return replace(step, calls=(*step.calls[:at], change(step.calls[at]), *step.calls[at + 1 :]))


def read_another(call: OpCall) -> OpCall:
    first = next(i for i, a in enumerate(call.args) if isinstance(a, Ref))
    return replace(call, args=(*call.args[:first], Ref(10**6), *call.args[first + 1 :]))


BROKEN: dict[str, Callable[[Captured], Captured]] = {
    "reads what it does not name": lambda s: change_call(s, read_another),
    "makes what it does not name": lambda s: change_call(s, lambda c: replace(c, outputs=())),
    "runs nothing": lambda s: change_call(s, lambda c: replace(c, target=None)),
    "a call too few": lambda s: replace(s, calls=s.calls[:-1]),
    "a sample too many": lambda s: replace(s, samples=(*s.samples, None)),
    "a sample larger than its storage": lambda s: replace(
        s, samples=tuple(None if t is None else torch.empty(10**6, device="meta") for t in s.samples)
    ),
}


def test_a_captured_step_holds_together(step: Captured) -> None:
    check_captured(step)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_one_is_found_and_the_pass_named(step: Captured, how: str) -> None:
    breaks = Pass(name="breaks-steps", where="", becomes="", saves="", level=Level.STEP, numbers=Numbers.ROUNDS, run=one_way(BROKEN[how]))
    with pytest.raises(AssertionError, match="after the pass breaks-steps"), watch_passes(check_rewritten):
        run_passes([breaks], step, Context())
