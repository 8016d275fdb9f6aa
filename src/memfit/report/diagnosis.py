"""Why a budget is refused, and what would lower it: one screen, or JSON, from the same values.

minimum    what no plan can go below, the op that needs it, and what must be there together at that op
fixed      what stays from step to step
passes     the minimum without and with each of them
outside    what only the user can change
next       the smallest budget that a plan was found for
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from memfit.core.units import format_bytes

_SHOWN, _WIDTH = 8, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Storages that must be there at the op that needs most: those alike in one row. `each_bytes` is None where their sizes differ; `made_by` is
    the op, `where` its module and line."""

    count: int
    kind: str
    size_bytes: int
    each_bytes: int | None
    name: str
    made_by: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEffect:
    """The minimum with nothing but this pass; `after_bytes` is None where it was not tried or found no place, and `note` says why."""

    name: str
    numbers: str
    before_bytes: int
    after_bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something outside the plan: what it is, and the minimum with it where that is known."""

    what: str
    after_bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A budget, and what a plan inside it costs in op time."""

    budget_bytes: int
    overhead_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`as_it_is_bytes` is the minimum of the step without any pass, `minimum_bytes` that of all forms that are allowed, which `form` has.

    `reached_bytes` is the smallest peak of a plan that was found, `larger` what more memory costs less. All of them count `beside_bytes`, what
    a budget holds besides the step.
    """

    minimum_bytes: int
    form: str
    held_at: str
    held: tuple[Held, ...]
    fixed: dict[str, int]
    as_it_is_bytes: int
    passes: tuple[PassEffect, ...]
    outside: tuple[Remedy, ...]
    refused: tuple[str, ...]
    reached_bytes: int | None
    reached_overhead_fraction: float | None
    keep_all_bytes: int
    larger: tuple[Priced, ...] = ()
    beside_bytes: int = 0
    budget_bytes: int | None = None
    budget_overhead_fraction: float | None = None

    @property
    def verdict(self) -> str:
        """BELOW THE MINIMUM, NO PLAN FOUND, A PLAN or FITS AS IT IS, for the budget that was asked about; empty without one."""
        if self.budget_bytes is None:
            return ""
        if self.budget_bytes < self.minimum_bytes:
            return "BELOW THE MINIMUM"
        if self.budget_bytes >= self.keep_all_bytes:
            return "FITS AS IT IS"
        return "A PLAN" if self.budget_overhead_fraction is not None else "NO PLAN FOUND"

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        sections = (self._head(), self._list_held(), self._list_fixed(), self._list_passes(), self._list_outside(), self._list_refused())
        return "\n".join(line for section in sections for line in section)

    def _head(self) -> list[str]:
        lines = []
        if self.budget_bytes is not None:
            more = _say_overhead(self.budget_overhead_fraction)
            lines.append(f"budget   {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes): {self.verdict}{more and ',' + more}")
        lines.append(f"minimum  {format_bytes(self.minimum_bytes)} ({self.minimum_bytes} bytes), proven; {self.held_at}")
        if self.reached_bytes is not None:
            more = _say_overhead(self.reached_overhead_fraction)
            lines.append(
                f"reached  {format_bytes(self.reached_bytes)} ({self.reached_bytes} bytes) by a plan{more and ',' + more}: the next budget to ask for"
            )
        if self.larger:
            lines.append(
                "larger   " + ", ".join(f"{format_bytes(p.budget_bytes)}{_say_overhead(p.overhead_fraction)}" for p in self.larger)
            )
        lines.append(f"plain    {format_bytes(self.keep_all_bytes)}: from there on nothing has to be planned")
        return lines

    def _list_held(self) -> list[str]:
        shown, rest = self.held[:_SHOWN], self.held[_SHOWN:]
        lines = [f'what must be there together (form "{self.form}"):', *(f"  {_describe(row)}" for row in shown)]
        if rest:
            lines.append(f"  {format_bytes(sum(r.size_bytes for r in rest)):>11}  {sum(r.count for r in rest)} smaller ones")
        if self.beside_bytes:
            lines.append(f"  {format_bytes(self.beside_bytes):>11}  held outside the step or left to the allocator")
        return lines

    def _list_fixed(self) -> list[str]:
        total = sum(self.fixed.values())
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.fixed.items() if size)
        return [f"fixed from step to step: {format_bytes(total)} ({parts})"]

    def _list_passes(self) -> list[str]:
        lines = [f"what memfit can do (minimum as it is {format_bytes(self.as_it_is_bytes)}, each alone):"]
        width = max((len(p.name) for p in self.passes), default=0)
        lines += [
            f"  {row.name:<{width}}  {_change(row.before_bytes, row.after_bytes)}; {_join('; ', row.numbers, row.note)}"
            for row in self.passes
            if row.after_bytes is not None and (row.after_bytes != row.before_bytes or row.note)
        ]
        same = [p.name for p in self.passes if p.after_bytes == p.before_bytes and not p.note]
        lines += _wrap("apply, minimum unchanged", same) if same else []
        for note in dict.fromkeys(p.note for p in self.passes if p.after_bytes is None):
            lines += _wrap(note, [p.name for p in self.passes if p.after_bytes is None and p.note == note])
        return lines

    def _list_outside(self) -> list[str]:
        lines = ["what only you can change:"] if self.outside else []
        for row in self.outside:
            change = "" if row.after_bytes is None else f"  {_change(self.minimum_bytes, row.after_bytes)}"
            lines.append(f"  {row.what}{change}{('; ' if change else ': ') + row.note if row.note else ''}")
        return lines

    def _list_refused(self) -> list[str]:
        return [f"refused: {text}" for text in self.refused]


def _describe(row: Held) -> str:
    each = "of them" if row.each_bytes is None else f"x {format_bytes(row.each_bytes)}"
    many = f"{row.count} {each}" if row.count > 1 else ""
    if row.kind == "gradient" and row.name:
        return f"{format_bytes(row.size_bytes):>11}  {row.kind:<10} {_join(' ', many, row.name)}"  # its parameter says where
    made = _join(" ", f"by {row.made_by}" if row.made_by else "", f"at {row.where}" if row.where else "")
    return f"{format_bytes(row.size_bytes):>11}  {row.kind:<10} {_join(' ', many, row.name, 'made ' + made if made else '')}"


def _change(before: int, after: int) -> str:
    return f"{format_bytes(before)} -> {format_bytes(after)}"


def _join(between: str, *parts: str) -> str:
    return between.join(filter(None, parts))


def _wrap(head: str, names: list[str]) -> list[str]:
    return wrap(f"{head}: {', '.join(names)}", width=_WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _say_overhead(fraction: float | None) -> str:
    """Forms of ops that hold less may also be faster."""
    return "" if fraction is None else f" at {100 * abs(fraction):.0f} % {'less' if fraction < 0 else 'more'} op time"
