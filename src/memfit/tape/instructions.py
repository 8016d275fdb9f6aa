"""A schedule lowered onto a program: which buffer every step reads, writes, takes and gives back.

    Schedule   Compute(7)                       Free(3)
    lowered    take 12, run kernel 7, drop 13   drop 4          buffers are numbered as `core.lifetimes` numbers them

All bookkeeping (take-overs, second copies, scratch) happens here, once; a memory only maps numbers to bytes. Sources have
negative numbers: they are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.core.costs import DEVICE
from memfit.core.errors import BadInput
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule
from memfit.tape.array import Kernel
from memfit.tape.array_view import Spec, View
from memfit.tape.program import Program

Slot = tuple[int, View]
"""A buffer number and how to read it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Take buffers, run a kernel on them, give buffers back."""

    kernel: Kernel
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    scratch: tuple[Slot, ...]
    takes: tuple[int, ...]
    drops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    buffer: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a buffer to a level; `storage` names the copy."""

    buffer: int
    storage: int
    level: int


@dataclass(frozen=True, slots=True)
class Load:
    """Take a buffer and fill it from a level's copy."""

    buffer: int
    storage: int
    level: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop a level's copy."""

    storage: int
    level: int


Instruction = Run | Drop | Save | Load | Forget


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """`sizes_bytes[k]` is the size of buffer k; `sources` the (tensor, buffer) pairs of the caller's data."""

    instructions: tuple[Instruction, ...]
    sizes_bytes: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    results: tuple[Slot, ...]


def lower(program: Program, schedule: Schedule) -> Lowered:
    """Follows the judge's rules; the schedule should have been judged, and is refused here only if it cannot be followed."""
    return _Lowering(program).run(schedule)


@dataclass
class _Lowering:
    program: Program
    sizes: list[int] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)  # storage -> buffer

    def run(self, schedule: Schedule) -> Lowered:
        graph = self.program.graph
        sources = tuple((tensor, -1 - k) for k, tensor in enumerate(graph.sources))
        self.live = {graph.storage_of(tensor): buffer for tensor, buffer in sources}
        instructions = tuple(self._lower(step) for step in schedule.steps)
        return Lowered(
            instructions=instructions,
            sizes_bytes=tuple(self.sizes),
            sources=sources,
            results=tuple((self._at(graph.storage_of(t)), view) for t, view in self.program.results),
        )

    def _lower(self, step: object) -> Instruction:
        if isinstance(step, Compute):
            return self._compute(step)
        if isinstance(step, Free):
            return Drop(self._pop(step.storage)) if step.level == DEVICE else Forget(step.storage, step.level)
        if isinstance(step, Offload):
            return Save(self._at(step.storage), step.storage, step.level)
        assert isinstance(step, Reload)
        return Load(self._bear(step.storage), step.storage, step.level)

    def _compute(self, step: Compute) -> Run:
        graph, call = self.program.graph, self.program.calls[step.op]
        form, storage_of = graph.ops[step.op].form(step.variant), graph.storage_of
        inputs = tuple((self._at(storage_of(t)), view) for t, view in call.inputs)
        old_of = {storage_of(new): storage_of(old) for new, old in form.inplace_of}
        takes: list[int] = []
        drops: list[int] = []
        written: dict[int, int] = {}
        for storage in dict.fromkeys(map(storage_of, form.outputs)):
            if storage in old_of:
                written[storage] = self._pop(old_of[storage])
                if storage in self.live:
                    drops.append(written[storage])  # the value is still there: what is written over the old bytes goes
                else:
                    self.live[storage] = written[storage]
            elif storage in self.live:
                written[storage] = self._scratch(graph.storages[storage].size_bytes, takes, drops)
            else:
                written[storage] = self._bear(storage)
                takes.append(written[storage])
        outputs = tuple((written[storage_of(t)], view) for t, view in call.outputs)
        return Run(call.kernel, inputs, outputs, self._workspace(step, takes, drops), tuple(takes), tuple(drops))

    def _workspace(self, step: Compute, takes: list[int], drops: list[int]) -> tuple[Slot, ...]:
        call = self.program.calls[step.op]
        if not call.scratch:
            return ()
        declared = self.program.costs.workspace(step.op, step.variant)
        assert declared == call.scratch_bytes, "costs declare the scratch that the call needs"
        if not declared:
            return tuple((0, spec.view()) for spec in call.scratch)  # empty arrays look at no buffer
        buffer = self._scratch(declared, takes, drops)
        return _carve(buffer, call.scratch)

    def _scratch(self, size_bytes: int, takes: list[int], drops: list[int]) -> int:
        if not size_bytes:
            return 0  # core.lifetimes lists no empty scratch; an empty array looks at no buffer
        self.sizes.append(size_bytes)
        takes.append(len(self.sizes) - 1)
        drops.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def _bear(self, storage: int) -> int:
        self.sizes.append(self.program.graph.storages[storage].size_bytes)
        self.live[storage] = len(self.sizes) - 1
        return self.live[storage]

    def _at(self, storage: int) -> int:
        if storage not in self.live:
            raise BadInput(f"the schedule uses storage {storage}, which is not there: judge it with memfit.simulate, which says why.")
        return self.live[storage]

    def _pop(self, storage: int) -> int:
        buffer = self._at(storage)
        del self.live[storage]
        return buffer


def _carve(buffer: int, specs: tuple[Spec, ...]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for spec in specs:
        whole = spec.view()
        slots.append((buffer, View(whole.shape, whole.strides, offset, whole.dtype)))
        offset += spec.buffer_bytes
    return tuple(slots)
