"""The forms of a step: what the passes of an engine make of it, each with a name, made when it is asked for.

traced ─ lowered ─┬─ in regions, or as it is, with choices ...       usual
                  ├─ a FORM pass, then the same                      usual
                  └─ an IF_SLOW or LAST_RESORT pass, then the same   where the usual ones have no plan, or a slow one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.capture import Surroundings, Traced
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor import Inductor
from memfit.passes.interface import Context, Level, Numbers
from memfit.passes.run import run_passes, run_ways
from memfit.passes.table import FIRST_FORMS, PIPELINE, Slot, Use
from memfit.pipeline.capture import engine_of, lower_for, trace_for
from memfit.pipeline.task import Task

_WORTH_COMPILING = 300  # ops of a step, traced for the compiler


FormKey = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A step in one of its forms. `use` says where it is tried, `rounds` whether its numbers may be rounded otherwise than the plain model's;
    `way` tells the ways of one pass apart."""

    name: str
    captured: Captured
    use: Use = Use.FORM
    rounds: bool = True
    way: int = 0

    @property
    def key(self) -> FormKey:
        return self.name, self.way


def note_checkpoints(count: int) -> str:
    places = f"{count} places" if count > 1 else "one place"
    return f"torch.utils.checkpoint is left out at {places} of the model: the plan says what is computed again" if count else ""


def surroundings_of(task: Task, accumulates: bool) -> Surroundings:
    target = "cuda" if task.is_elsewhere else None
    return Surroundings(optimizer=task.optimizer, accumulates=accumulates, reserve_bytes=task.reserve_bytes, target=target)


class Forms:
    """All forms of one call's step. `lowered`: the step, where somebody has it already."""

    def __init__(self, task: Task, call: Call, *, accumulates: bool = False, lowered: Captured | None = None) -> None:
        self.task, self.call = task, call
        self._around = surroundings_of(task, accumulates)
        self._traced: dict[bool, Traced] = {}
        self._lowered: dict[Inductor | None, Captured] = {} if lowered is None else {None: lowered}

    def usual(self) -> Iterator[Form]:
        """The forms to look at first; each graph once."""
        seen: set[str] = set()
        for name, numbers in self._firsts:
            form = self._make_first(name, numbers)
            if form.captured.graph.digest not in seen:
                seen.add(form.captured.graph.digest)
                yield form
        seen.add(self.plain.graph.digest)
        for slot in self._slots_of(Use.FORM):
            yield from self._make(slot, seen)

    def slower(self) -> Iterator[tuple[Use, Iterator[Form]]]:
        """Forms that hold less and less and take longer: those of one pass after another, each from its fastest way on."""
        seen: set[str] = set()
        for slot in self._slots_of(Use.IF_SLOW, Use.LAST_RESORT):
            yield slot.use, self._make(slot, seen)

    def every(self) -> Iterator[Form]:
        """All of them, in this order."""
        yield from self.usual()
        for _, forms in self.slower():
            yield from forms

    def only(self, slot: Slot) -> Iterator[Form]:
        """The step as it is but for one pass, whatever the user allows: each way of it; none where it finds no place."""
        rewrite, place = slot.rewrite, self.slots.index(slot)
        if rewrite.may_apply is not None and not rewrite.may_apply(self.plain):
            return
        before = self._always(self.plain, self.slots[:place])
        for way in run_ways(rewrite, before, Context(compiler=self.compiler)):
            if way.graph.digest != before.graph.digest:
                after = self._always(way, self.slots[place + 1 :])
                yield Form(name=rewrite.name, captured=after, use=slot.use, rounds=rewrite.numbers is Numbers.ROUNDS)

    @property
    def note(self) -> str:
        """What the report says of the step as it was traced."""
        return note_checkpoints(max((traced.joint.num_checkpoints for traced in self._traced.values()), default=0))

    def find(self, key: FormKey) -> Form | None:
        """One of them, without making those before it; None if there is none of this name."""
        for name, numbers in self._firsts:
            if name == key[0]:
                return self._make_first(name, numbers)
        slots = [slot for slot in self._slots_of(Use.FORM, Use.IF_SLOW, Use.LAST_RESORT) if slot.rewrite.name == key[0]]
        found = (form for slot in slots for form in self._make(slot, set()) if form.key == key)
        return next(found, None)

    # -- what they are made of ---------------------------------------------------------------------------------------

    @cached_property
    def compiler(self) -> Inductor | None:
        """None where the step runs op by op: asked for, or too small to be worth compiling."""
        if not self.task.compiles:
            return None
        worth = self.task.engine == "inductor" or len(self._lower(Inductor()).graph.ops) >= _WORTH_COMPILING
        return Inductor() if worth else None

    @property
    def engine(self) -> str:
        return engine_of(self.compiler)

    @property
    def plain(self) -> Captured:
        """The step before any choice."""
        return self._lower(self.compiler)

    def _trace(self, compiler: Inductor | None) -> Traced:
        """Once for each kind of ops."""
        key = compiler is not None
        if key not in self._traced:
            task = self.task
            self._traced[key] = trace_for(
                compiler,
                task.model,
                self.call,
                loss_fn=task.loss_fn,
                num_targets=task.num_targets,
                gpu_attention=task.is_elsewhere,
                loss_only=task.keep_outputs is False,
            )
        return self._traced[key]

    def _lower(self, compiler: Inductor | None) -> Captured:
        if compiler not in self._lowered:
            self._lowered[compiler] = lower_for(compiler, self._trace(compiler), self._around)
        return self._lowered[compiler]

    # -- running the table -------------------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What rewrites lowered steps."""
        return tuple(slot for slot in PIPELINE[self.engine] if slot.rewrite.level in (Level.STEP, Level.OP))

    def _slots_of(self, *uses: Use) -> list[Slot]:
        return [slot for slot in self.slots if slot.use in uses] if self.task.has_variants else []

    @property
    def _firsts(self) -> tuple[tuple[str, frozenset[Numbers]], ...]:
        return FIRST_FORMS[self.engine] if self.task.has_variants else FIRST_FORMS[self.engine][:1]

    def _make_first(self, name: str, numbers: frozenset[Numbers]) -> Form:
        captured = self._finish(self.plain, self.slots, numbers)
        return Form(name=name, captured=captured, rounds=captured.compiled or Numbers.ROUNDS in numbers)

    def _make(self, slot: Slot, seen: set[str]) -> Iterator[Form]:
        """A form for each way of one pass, between what always runs before it and after it."""
        rewrite, place = slot.rewrite, self.slots.index(slot)
        if rewrite.may_apply is not None and not rewrite.may_apply(self.plain):
            return
        step = self._lower(Inductor(pads=False)) if rewrite.reads_products and self.compiler is not None else self.plain
        before = self._finish(step, self.slots[:place], frozenset())
        for number, way in enumerate(run_ways(rewrite, before, self._context)):
            if way.graph.digest not in seen:
                seen.add(way.graph.digest)
                captured = self._finish(way, self.slots[place + 1 :], frozenset(Numbers))
                yield Form(name=rewrite.name, captured=captured, use=slot.use, way=number)

    def _finish(self, step: Captured, slots: tuple[Slot, ...], numbers: frozenset[Numbers]) -> Captured:
        """What runs in every form, and the choices that give such numbers."""
        uses = {Use.ALWAYS, Use.ALLOWED, Use.CHOICE} if self.task.has_variants else {Use.ALWAYS}
        wanted = [s.rewrite for s in slots if s.use in uses and (s.use is not Use.CHOICE or s.rewrite.numbers in numbers)]
        rewritten: Captured = run_passes(wanted, step, self._context)
        return rewritten

    def _always(self, step: Captured, slots: tuple[Slot, ...]) -> Captured:
        rewritten: Captured = run_passes((s.rewrite for s in slots if s.use is Use.ALWAYS), step, self._context)
        return rewritten

    @property
    def _context(self) -> Context:
        return Context(compiler=self.compiler, variants=self.task.has_variants)
