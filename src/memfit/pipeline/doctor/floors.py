"""The minimum of each form of a step, by counting alone; what must coexist there; and what each pass does to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from memfit.core.graph import Op
from memfit.passes.table import Use
from memfit.pipeline.costs import Costed, TableCosts
from memfit.pipeline.forms import Form, Forms
from memfit.planning.model.lower_bounds import Floor, find_floor, list_coexisting
from memfit.planning.model.reduce import Model, build_model
from memfit.report.diagnosis import Held, PassEffect

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|,|$)")  # a part of a module's path that is a number


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


def list_held(lowest: Lowest) -> tuple[Held, ...]:
    """What must be there together at the minimum, those alike in one row, the largest first."""
    graph, model = lowest.costed.captured.graph, lowest.model
    storages, workspace = list_coexisting(model, lowest.floor)
    makers = {graph.storage_of(t): op for op in reversed(graph.ops) for form in op.forms for t in form.outputs}
    given = {graph.storage_of(t) for t in graph.sources}
    throughout = given & {graph.storage_of(t) for t in graph.results}
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for s in sorted(throughout):
        alike[(graph.storages[s].kind,)].append(s)
    for s in storages:
        if s < len(graph.storages):  # the others are marks without bytes
            maker = None if s in given else makers.get(s)
            alike[_likeness(graph.storages[s].kind, graph.storages[s].name, graph.storages[s].size_bytes, maker)].append(s)
    rows = [_merge(lowest, members, makers, given) for members in alike.values()]
    if workspace:
        form = lowest.floor.entered_by if lowest.floor.entered_by >= 0 else lowest.floor.form
        rows.append(
            Held(
                count=1,
                kind="workspace",
                size_bytes=workspace,
                each_bytes=workspace,
                name=f"of {model.describe(form)}",
                made_by="",
                where="",
            )
        )
    return tuple(sorted((r for r in rows if r.size_bytes), key=lambda r: -r.size_bytes))


def _likeness(kind: str, name: str, size: int, maker: Op | None) -> tuple[object, ...]:
    return (kind, size, _pattern(name) if maker is None else maker.name, _pattern(maker.where) if maker else "")


def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path, count=1)


def _merge(lowest: Lowest, members: list[int], makers: dict[int, Op], given: set[int]) -> Held:
    graph = lowest.costed.captured.graph
    found = [graph.storages[s] for s in members]
    made = [makers[s] for s in members if s in makers and s not in given]
    sizes = {s.size_bytes for s in found}
    return Held(
        count=len(found),
        kind=str(found[0].kind),
        size_bytes=sum(s.size_bytes for s in found),
        each_bytes=sizes.pop() if len(sizes) == 1 else None,
        name=join_numbers([s.name for s in found]) if len(found) > 1 and not made else found[0].name if len(found) == 1 else "",
        made_by=made[0].name if made else "",
        where=join_numbers([op.where for op in made]) if made else "",
    )


def join_numbers(texts: list[str]) -> str:
    """Several module paths as one: layers.0..11.mlp; empty where they differ in more than the first number."""
    patterns = {_pattern(text) for text in texts}
    if len(patterns) > 1:
        return ""
    numbers = sorted({int(found.group()) for text in texts if (found := _NUMBER.search(text))})
    if len(numbers) <= 1:
        return texts[0]
    return patterns.pop().replace("*", f"{numbers[0]}..{numbers[-1]}", 1)
