"""The bytes and the time no plan can go below, by counting alone.

When an op first makes something every plan must make, its inputs, its outputs, its workspace, all results that must
exist by then, and what the caller holds are on the device together. And before that there is a moment when the last of
these inputs is made: the others are there already, beside what *that* takes.

    inputs of an op   a ├──────────        whichever of them is made last, the others wait: the least of
                      b   ├────────        {a, b, c, inputs of a's maker}, {a, b, c, inputs of b's}, {a, b, c, inputs of c's}
                      c        ├───

The largest such set is a floor on the peak, and one that anybody can check by adding up a handful of storages. With several
producers the smallest form counts, and only what is required whichever producers are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.units import format_bytes
from memfit.planning.model.reduce import Model

_LOOKED_BACK = 64
"""Ops, those that need most, whose last input is looked at."""
_SOURCES_ALONE = "the step's inputs alone hold that much"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """`form` is the op that needs `bytes`; -1 when the start or the end of the step does. `entered_by` is the op that makes the last of its
    inputs, where that moment needs more than the op itself; else -1."""

    bytes: int
    form: int
    time_ns: int
    where: str
    entered_by: int = -1

    def sentence(self, limit_bytes: int) -> str:
        return (
            f"{format_bytes(limit_bytes)} ({limit_bytes} bytes) is below the proven minimum {format_bytes(self.bytes)} "
            f"({self.bytes} bytes): {self.where}. Try that as a budget, smaller inputs, or other operator variants."
        )


def find_floor(model: Model) -> Floor:
    a = model.arrays
    sources = a.base_bytes + int(a.size[a.source].sum())
    results = a.base_bytes + int(a.size[a.pinned].sum())
    best, form, by = max(sources, results), -1, -1
    where = _SOURCES_ALONE if sources >= results else "its results alone hold that much"
    if model.partial:
        return Floor(bytes=sources, form=-1, time_ns=0, where=_SOURCES_ALONE)
    earlier = _find_results_before(model)
    alone: list[tuple[int, int]] = []  # (bytes, storage)
    for s in sorted(find_required(model)):
        needs = [(_working_set(model, f, earlier[f]), f) for f in model.producers[s]]
        if needs:
            alone.append((min(needs)[0], s))
            if min(needs)[0] > best:
                best, form = min(needs)
                count = len(set(model.ins[form]) | set(model.outs[form]) | set(list_members(earlier[form])))
                where = f"at {model.describe(form)} {count} storages must coexist"
    for _, s in sorted(alone, reverse=True)[:_LOOKED_BACK]:
        entered = min((*_least_before(model, f, earlier[f]), f) for f in model.producers[s])
        if entered[0] > best:
            best, by, form = entered
            where = f"when the last input of {model.describe(form)} is made, the others and what that takes must coexist"
    return Floor(bytes=best, form=form, time_ns=_least_time(model), where=where, entered_by=by)


def list_coexisting(model: Model, floor: Floor) -> tuple[tuple[int, ...], int]:
    """The storages that a floor adds up, beside those that the caller holds throughout, and the workspace it counts: with those its bytes."""
    a = model.arrays
    if floor.form < 0:
        alike = a.source if floor.where == _SOURCES_ALONE else a.pinned
        return tuple(s for s in range(model.num_storages) if alike[s]), 0
    needed = set(model.ins[floor.form]) | set(list_members(_find_results_before(model)[floor.form]))
    if floor.entered_by < 0:
        return tuple(sorted(needed | set(model.outs[floor.form]))), int(a.workspace[floor.form])
    by = floor.entered_by
    replaced = {new for new, _ in model.takes[by] if new in needed}
    return tuple(sorted((needed | {*model.ins[by], *model.outs[by]}) - replaced)), int(a.workspace[by])


def list_working_sets(model: Model) -> list[tuple[int, int]]:
    """(the least that is held when it is made, storage) of what every plan makes, the most demanding first."""
    earlier = _find_results_before(model)
    made = [s for s in find_required(model) if model.producers[s]]
    return sorted(((min(_working_set(model, f, earlier[f]) for f in model.producers[s]), s) for s in made), reverse=True)


def find_required(model: Model) -> set[int]:
    """Storages every plan makes: the results, and whatever all producers of a required storage read."""
    return _closure(model, [s for s in range(model.num_storages) if model.arrays.pinned[s]])


def find_required_before(model: Model, storage: int) -> set[int]:
    """Storages every plan has made by the time it first makes `storage`."""
    return _closure(model, [storage]) - {storage}


def _closure(model: Model, wanted: list[int]) -> set[int]:
    required: set[int] = set()
    while wanted:
        s = wanted.pop()
        if s in required or not model.producers[s]:
            continue
        required.add(s)
        wanted.extend(set.intersection(*(set(model.ins[f]) for f in model.producers[s])))
    return required


def _working_set(model: Model, form: int, earlier: int) -> int:
    a = model.arrays
    held = set(model.ins[form]) | set(list_members(earlier))
    held -= set(model.outs[form])
    fresh = sum(int(a.size[s]) for s in model.outs[form])
    return int(a.base_bytes + a.workspace[form] + fresh + sum(int(a.size[s]) for s in held))


def _least_before(model: Model, form: int, earlier: int) -> tuple[int, int]:
    """The least that is held when the last of what `form` needs is made, whichever that is, and what makes it."""
    a = model.arrays
    needed = set(model.ins[form]) | set(list_members(earlier))
    held = int(a.base_bytes) + sum(int(a.size[s]) for s in needed)
    least = [
        (held + int(a.workspace[g]) + _extra_bytes(model, g, needed), g)
        for s in needed
        for g in model.producers[s]
        if not model.arrays.source[s]
    ]
    return min(least, default=(0, -1))


def _extra_bytes(model: Model, form: int, needed: set[int]) -> int:
    """Bytes of what `form` reads and makes beyond `needed`; what it makes in place has no bytes of its own yet."""
    size = model.arrays.size
    fresh = sum(int(size[s]) for s in {*model.ins[form], *model.outs[form]} - needed)
    return fresh - sum(int(size[new]) for new, _ in model.takes[form] if new in needed)


def list_members(bits: int) -> list[int]:
    """The storages of a bit set."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _find_results_before(model: Model) -> list[int]:
    """For each form a bit set of results that must exist when it runs, whichever producers a plan chooses."""
    pinned = model.arrays.pinned
    of_storage = [0] * model.num_storages
    of_form = [0] * model.num_forms
    for f in range(model.num_forms):
        for s in model.ins[f]:
            of_form[f] |= of_storage[s] | (1 << s if pinned[s] else 0)
        for s in (*model.outs[f], *(new for new, _ in model.takes[f])):
            ops = {model.forms[g][0] for g in model.producers[s]}
            if len(ops) == 1 and f == model.producers[s][-1]:  # another op could make it with other ancestors: claim nothing
                common = of_form[f]
                for g in model.producers[s]:
                    common &= of_form[g]
                of_storage[s] = common
    return of_form


def _least_time(model: Model) -> int:
    """Every required storage is made at least once, by its cheapest form; an op that makes several counts once."""
    least: dict[int, int] = {}
    for s in find_required(model):
        ops = {model.forms[f][0] for f in model.producers[s]}
        if len(ops) == 1:
            op = next(iter(ops))
            least[op] = max(least.get(op, 0), min(int(model.arrays.time[f]) for f in model.producers[s]))
    return sum(least.values())
