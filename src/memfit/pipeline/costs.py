"""What a form of a step costs: compiled first where it is to be measured, then timed, or priced by a table of devices.

form ─ what was never measured is compiled ─> measured ─ forms of ops that never pay are left out ─> Costed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from memfit.capture.captured import Captured
from memfit.compilers.inductor import compile_pieces
from memfit.compilers.inductor.compile_all import Tell
from memfit.core.costs import Costs
from memfit.core.plan import Plan
from memfit.pipeline.forms import Form, FormKey
from memfit.pipeline.known_costs import Cache, StepCosts
from memfit.pipeline.task import Task
from memfit.planning import plan as find_plan
from memfit.planning.model.unbeaten_forms import even_out, find_unbeaten
from memfit.profile.measure import first_calls, measure
from memfit.profile.roofline import roofline
from memfit.report.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A form that can be planned."""

    name: str
    captured: Captured
    costs: Costs
    rounds: bool = False
    way: int = 0

    @property
    def key(self) -> FormKey:
        return self.name, self.way

    @cached_property
    def keep_all(self) -> Plan:
        """The plan that computes everything once and frees what nobody reads any more."""
        return find_plan(self.captured.graph, self.costs, None, planner="keep_all").require_plan()


def cost(form: Form, task: Task, progress: Progress) -> Costed:
    """On the model's own device, or by a roofline of the one that was named."""
    captured, costs = form.captured, _costs(form.captured, task, progress)
    if captured.compiled:
        captured, costs = leave_out_beaten(captured, costs)
    return Costed(name=form.name, captured=captured, costs=costs, rounds=form.rounds, way=form.way)


def _costs(captured: Captured, task: Task, progress: Progress) -> Costs:
    if task.device is not None:
        return roofline(captured, task.device)
    if any(p.device.type == "meta" for p in task.model.parameters()):
        return roofline(captured, "cpu")
    return measure_costs(captured, progress.update)


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """Costs without running anything: by the table; on a device that is here with the workspaces that an earlier `fit` measured, and its
    times where all are known."""

    device: str | None
    cache: Cache = field(default_factory=Cache)

    def of(self, captured: Captured) -> Costs:
        if self.device is not None or captured.device.type == "meta":
            return roofline(captured, self.device or "cpu")
        table = roofline(captured, "h200" if captured.device.type == "cuda" else "cpu")
        return StepCosts(captured, self.cache).known_or(table)


def measure_costs(captured: Captured, progress: Tell | None = None, *, cache: Cache | None = None) -> Costs:
    """Time and workspace of every op on the device where the model lives: what was never measured there is compiled and measured."""
    known, tell = StepCosts(captured, cache), progress or _tell_nobody
    missing = known.missing()
    compile_pieces((captured.call(*form).target for form in missing), tell, first_calls(captured, missing))
    return known.fill(measure(captured, missing, tell))


def leave_out_beaten(captured: Captured, costs: Costs) -> tuple[Captured, Costs]:
    """The same step with fewer choices, the fastest of the remaining forms first, and its costs."""
    costs = even_out(captured.graph, costs)
    kept = find_unbeaten(captured.graph, costs)
    if all(forms == list(range(len(op.forms))) for op, forms in zip(captured.graph.ops, kept, strict=True)):
        return captured, costs
    fewer = captured.keep_forms(kept)
    return fewer, costs.keep_forms(kept, fewer.graph)


def _tell_nobody(what: str, done: int, total: int) -> None:
    pass
