"""What must be there together at the minimum, for people: storages alike are one row, gradients are named after their parameters.

storages ─ of layers.0.mlp, layers.1.mlp, ... , same size and maker ─> 12 x 9.00 MiB ... at layers.0..11.mlp
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.captured import Captured, Role
from memfit.core.graph import Kind, Op
from memfit.pipeline.doctor.floors import Lowest
from memfit.planning.model.lower_bounds import list_coexisting
from memfit.report.diagnosis import Held

_NUMBER = re.compile(r"(?<![^. ])\d+(?=\.|,|$)")  # a part of a module's path that is a number


def list_held(lowest: Lowest) -> tuple[Held, ...]:
    """The rows, the largest first; with the workspace they add up to the minimum."""
    captured, model, floor = lowest.costed.captured, lowest.model, lowest.floor
    known = _Known(captured=captured)
    storages, workspace = list_coexisting(model, floor)
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for s in sorted(known.throughout):
        alike[(captured.graph.storages[s].kind,)].append(s)
    for s in storages:
        if s < len(captured.graph.storages):  # the others are marks without bytes
            alike[known.likeness(s)].append(s)
    rows = [known.row(members) for members in alike.values()]
    if workspace:
        name = f"of {model.describe(floor.entered_by if floor.entered_by >= 0 else floor.form)}"
        rows.append(Held(count=1, kind="workspace", size_bytes=workspace, each_bytes=workspace, name=name, made_by="", where=""))
    return tuple(sorted((r for r in rows if r.size_bytes), key=lambda r: -r.size_bytes))


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What a step's storages are called, and what makes them."""

    captured: Captured

    @cached_property
    def given(self) -> set[int]:
        return set(map(self.captured.graph.storage_of, self.captured.graph.sources))

    @cached_property
    def throughout(self) -> set[int]:
        return self.given & set(map(self.captured.graph.storage_of, self.captured.graph.results))

    @cached_property
    def makers(self) -> dict[int, Op]:
        graph = self.captured.graph
        return {graph.storage_of(t): op for op in reversed(graph.ops) for form in op.forms for t in form.outputs}

    @cached_property
    def gradients(self) -> dict[int, str]:
        """Storage of a gradient -> the parameter's name."""
        graph, sources = self.captured.graph, self.captured.convention.sources
        found = [(op, call) for op, call in zip(graph.ops, self.captured.calls, strict=True) if call.role is Role.ACCUMULATE]
        return {graph.storage_of(op.inputs[0]): graph.storages[graph.storage_of(sources[call.index])].name for op, call in found}

    def maker(self, storage: int) -> Op | None:
        return None if storage in self.given else self.makers.get(storage)

    def name(self, storage: int) -> str:
        if storage in self.gradients:
            return f"of {self.gradients[storage]}"
        if self.captured.graph.storages[storage].kind is Kind.GRADIENT and self.maker(storage) is not None:
            return "of an output"
        return "" if self.maker(storage) is not None else self.captured.graph.storages[storage].name

    def likeness(self, storage: int) -> tuple[object, ...]:
        it, maker = self.captured.graph.storages[storage], self.maker(storage)
        made = ("", "") if maker is None else (maker.name, _pattern(maker.where))
        return (it.kind, it.size_bytes, _pattern(self.name(storage)), *made)

    def row(self, members: list[int]) -> Held:
        found = [self.captured.graph.storages[s] for s in members]
        made = [op for s in members if (op := self.maker(s)) is not None]
        same_size = len({s.size_bytes for s in found}) == 1
        return Held(
            count=len(found),
            kind=str(found[0].kind),
            size_bytes=sum(s.size_bytes for s in found),
            each_bytes=found[0].size_bytes if same_size else None,
            name=join_numbers([self.name(s) for s in members]) if same_size else "",
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


def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path, count=1)
