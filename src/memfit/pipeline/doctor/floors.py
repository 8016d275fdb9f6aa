"""The minimum of each form of a step, by counting alone, and what each pass does to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from memfit.passes.table import Use
from memfit.pipeline.costs import Costed, TableCosts
from memfit.pipeline.forms import Form, Forms
from memfit.planning.model.lower_bounds import Floor, find_floor
from memfit.planning.model.reduce import Model, build_model
from memfit.report.diagnosis import PassEffect


@dataclass(frozen=True, kw_only=True)
class Lowest:
    """A form of a step with the least that any plan of it holds."""

    costed: Costed

    @cached_property
    def model(self) -> Model:
        return build_model(self.costed.captured.graph, self.costed.costs)

    @cached_property
    def floor(self) -> Floor:
        return find_floor(self.model)

    @property
    def bytes(self) -> int:
        return self.floor.bytes


def look_at(forms: Iterable[Form], costs: TableCosts) -> list[Lowest]:
    """Each form with its costs: nothing runs."""
    return [Lowest(costed=Costed(name=f.name, captured=f.captured, costs=costs.of(f.captured), rounds=f.rounds)) for f in forms]


def try_passes(forms: Forms, costs: TableCosts) -> tuple[PassEffect, ...]:
    """What each pass alone does to the minimum of the step as it is."""
    (plain,) = look_at([Form(name="", captured=forms.plain)], costs)
    rows = []
    for slot in forms.slots:
        if slot.use is Use.ALWAYS:
            continue
        found = look_at(forms.only(slot), costs)
        allowed = forms.task.has_variants
        rows.append(
            PassEffect(
                name=slot.rewrite.name,
                numbers=slot.rewrite.numbers.value,
                before_bytes=plain.bytes,
                after_bytes=min(x.bytes for x in found) if found else None,
                note="no such place in this step" if not found else "" if allowed else 'not allowed: allow= is without "variants"',
            )
        )
    return tuple(rows)
