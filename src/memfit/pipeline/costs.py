"""What a form of a step costs: compiled first where it is to be measured, then timed, or priced by a table of devices.

form ─ compile what was never measured ─> measure ─> drop forms of ops that never pay ─> Costed
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memfit.capture.captured import Captured
from memfit.compilers.inductor import compile_pieces
from memfit.core.costs import Costs
from memfit.core.plan import Plan
from memfit.passes.interface import Context, Level
from memfit.passes.run import run_passes
from memfit.passes.table import PIPELINE
from memfit.pipeline.forms import Form
from memfit.pipeline.task import Task
from memfit.planning import plan as find_plan
from memfit.profile.measure import Measurement
from memfit.profile.roofline import roofline
from memfit.report.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A form that can be planned."""

    name: str
    captured: Captured
    costs: Costs

    @cached_property
    def keep_all(self) -> Plan:
        """The plan that computes everything once and frees what nobody reads any more."""
        return find_plan(self.captured.graph, self.costs, None, planner="keep_all").require_plan()


def cost(form: Form, task: Task, progress: Progress) -> Costed:
    """On the model's own device, or by a roofline of the one that was named."""
    captured, costs = form.captured, _costs(form.captured, task, progress)
    if captured.compiled:
        after = (slot.rewrite for slot in PIPELINE["inductor"] if slot.rewrite.level is Level.COSTS)
        captured, costs = run_passes(after, (captured, costs), Context(variants=task.has_variants))
    return Costed(name=form.name, captured=captured, costs=costs)


def _costs(captured: Captured, task: Task, progress: Progress) -> Costs:
    if task.device is not None:
        return roofline(captured, task.device)
    if any(p.device.type == "meta" for p in task.model.parameters()):
        return roofline(captured, "cpu")
    measurement = Measurement(captured)
    compile_pieces(measurement.targets, progress.update, measurement.first_calls())
    return measurement.run(progress.update)
