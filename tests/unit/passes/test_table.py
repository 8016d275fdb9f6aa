"""The line of passes of each engine, and that running them leaves what they are given as it was."""

from __future__ import annotations

import torch
from tests.training import needs_a_compiler
from torch import nn

from memfit.capture.inputs import Call
from memfit.passes.interface import Context, Level
from memfit.passes.run import rewrite_traced
from memfit.passes.table import PIPELINE, Use
from memfit.pipeline.capture import trace_for
from memfit.pipeline.forms import Forms
from memfit.pipeline.pass_report import report_passes
from memfit.pipeline.task import Task


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 5),
    )


def forms(engine: str, **settings: tuple[str, ...]) -> Forms:
    call = Call.flatten((torch.randn(8, 3, 18, 18), torch.zeros(8, dtype=torch.long)), {})
    return Forms(Task(model=network(), loss_fn=nn.functional.cross_entropy, num_targets=1, engine=engine, **settings), call)


def test_levels_come_in_the_order_in_which_a_step_is_made() -> None:
    order = [Level.FX, Level.STEP, Level.OP]
    for slots in PIPELINE.values():
        assert len({slot.rewrite.name for slot in slots}) == len(slots)
        levels = [slot.rewrite.level for slot in slots if slot.rewrite.name not in ("concat-gradients", "regions")]
        assert levels == sorted(levels, key=order.index)
        assert all(slot.use is Use.ALWAYS for slot in slots if slot.rewrite.level is Level.FX)
        assert all((slot.use is Use.CHOICE) == (slot.rewrite.level is Level.OP) for slot in slots)


@needs_a_compiler
def test_a_traced_graph_stays_as_it_was() -> None:
    from memfit.compilers.inductor import Inductor

    made = forms("inductor")
    step = trace_for(Inductor(), made.task.model, made.call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    before = str(step.joint.module.graph)
    after = rewrite_traced(step.joint.module, "inductor", Context(compiler=Inductor()))
    assert str(step.joint.module.graph) == before
    assert str(after.graph) != before


def test_without_variants_a_step_has_one_form() -> None:
    assert [form.name for form in forms("eager", allow=("recompute",)).every()] == ["as it is"]
    names = [form.name for form in forms("eager").every()]
    assert names[:3] == ["as it is", "with choices of the same bits", "with choices"]
    assert len(names) > 3


def test_the_report_counts_places_and_bytes() -> None:
    rows = {row.slot.rewrite.name: row for row in report_passes(forms("eager"))}
    assert list(rows) == [slot.rewrite.name for slot in PIPELINE["eager"]]
    relu, attention = rows["relu-bits"], rows["attention-slices"]
    assert relu.places >= 1
    activation = 8 * 8 * 16 * 16 * 4
    assert 0.8 * activation <= relu.saved_bytes <= 2 * activation
    assert (attention.places, attention.saved_bytes) == (0, 0)
