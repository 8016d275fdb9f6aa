"""The executor: obeys a schedule, step by step, in a memory.

    Program + Schedule ── lower ──> instructions ── bind to Fresh | Pool | Arena ──> run(feeds) = results

In an arena every array is built once, when binding: running is then nothing but kernel calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import numpy as np

from memfit.core.costs import DISK
from memfit.core.errors import BadInput
from memfit.core.plan import Layout, Plan
from memfit.core.schedule import Schedule
from memfit.tape.array import Array
from memfit.tape.array_view import Data, round_up_bytes
from memfit.tape.instructions import Drop, Forget, Instruction, Load, Lowered, Run, Save, Slot, lower
from memfit.tape.memory.memories import EMPTY, Arena, Fresh, Memory, check_fits, new_buffer
from memfit.tape.plain_schedules import drop_early
from memfit.tape.program import Program, compile_program

Observe = Callable[[int], None]
"""Called during every step: after the kernel wrote, before scratch is given back."""


class Executor:
    """Runs one schedule of one program, as often as you like. `memory` is made anew for every run unless it is an arena."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        *,
        memory: Callable[[], Memory] = Fresh,
        layout: Layout | None = None,
        copy_sources: bool = False,
    ) -> None:
        self.program, self.lowered = program, lower(program, schedule)
        self.copy_sources, self.layout = copy_sources, layout
        self._memory = memory
        self._sources: dict[int, Data] | None = None
        self._bound: _Bound | None = None
        if layout is not None:
            check_fits(layout, self.lowered.sizes_bytes)

    def prepare(self) -> None:
        """Take what is held across runs: copies of the sources if asked for, and the arena. `run` does it by itself."""
        if self._sources is None:
            self._sources = self._hold_sources()
            if self.layout is not None:
                self._bound = _bind(self.lowered, Arena(self.layout), self._sources)

    @staticmethod
    def of_plan(program: Program, plan: Plan) -> Executor:
        """Any planner's plan: at its layout's offsets if it has one, else with a buffer per storage."""
        if plan.graph_digest != program.graph.digest:
            raise BadInput(
                f"the plan belongs to graph {plan.graph_digest[:12]}, the program is {program.graph.digest[:12]}: plan this program again."
            )
        return Executor(program, plan.schedule, layout=plan.layout)

    def run(self, feeds: Mapping[Array, Data] | None = None, *, observe: Observe | None = None) -> tuple[Data, ...]:
        """The results, as arrays of their own. `feeds` replaces the data of leaves.

        What lies in an arena, which the next run overwrites, is copied out of it; otherwise the results are the buffers.
        """
        self.prepare()
        assert self._sources is not None
        self._feed(feeds or {}, self._sources)
        levels = _Levels()
        try:
            if self._bound is not None:
                buffers = self._bound.buffers
                _run_bound(self._bound, levels, observe)
            else:
                buffers = _run_unbound(self.lowered, self._memory(), self._sources, levels, observe)
            return tuple(self._result(view.of(buffers[k]), k) for k, view in self.lowered.results)
        finally:
            levels.close()

    def _result(self, data: Data, buffer: int) -> Data:
        ours = self._bound is not None or buffer < 0
        return np.array(data) if ours or not data.flags.c_contiguous else data

    def _hold_sources(self) -> dict[int, Data]:
        held = {}
        for (tensor, data), (expected, buffer) in zip(self.program.leaves, self.lowered.sources, strict=True):
            assert tensor == expected
            held[buffer] = self._as_buffer(data)
        return held

    def _as_buffer(self, data: Data) -> Data:
        raw = data.reshape(-1).view(np.uint8) if data.size else EMPTY
        if not self.copy_sources:
            return raw
        own = new_buffer(round_up_bytes(raw.size))
        own[: raw.size] = raw
        return own

    def _feed(self, feeds: Mapping[Array, Data], sources: Mapping[int, Data]) -> None:
        places = dict(zip(self.program.leaf_values, range(len(self.program.leaves)), strict=True))
        for array, data in feeds.items():
            if array.value not in places:
                raise BadInput(f"{array!r} is not a leaf of this program: only inputs and parameters can be fed.")
            held = self.program.leaves[places[array.value]][1]
            given = np.asarray(data)
            if given.shape != held.shape:
                raise BadInput(f"fed data has shape {given.shape}, but the program was recorded for {held.shape}.")
            held[...] = given
            if self.copy_sources:
                buffer = sources[self.lowered.sources[places[array.value]][1]]
                buffer[: held.nbytes] = held.reshape(-1).view(np.uint8)


class _Levels:
    """Copies away from the device: bytes objects for the host (NumPy's own counters see device data only), a file for disk."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, int], bytearray] = {}
        self.files: dict[tuple[int, int], IO[bytes]] = {}

    def save(self, storage: int, level: int, data: Data) -> None:
        if level < DISK:
            self.copies[storage, level] = bytearray(data.data)
            return
        file = tempfile.TemporaryFile(prefix="memfit-")  # noqa: SIM115  (closed by forget or close)
        file.write(data.data)
        self.files[storage, level] = file

    def load(self, storage: int, level: int, data: Data) -> None:
        if (storage, level) in self.files:
            self.files[storage, level].seek(0)
            data.data[:] = self.files[storage, level].read()
        else:
            data.data[:] = self.copies[storage, level]

    def forget(self, storage: int, level: int) -> None:
        self.copies.pop((storage, level), None)
        if (storage, level) in self.files:
            self.files.pop((storage, level)).close()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files.clear()


def _arrays(slots: Sequence[Slot], buffers: Mapping[int, Data]) -> list[Data]:
    return [view.of(buffers.get(k, EMPTY)) for k, view in slots]


def _run_unbound(
    lowered: Lowered, memory: Memory, sources: Mapping[int, Data], levels: _Levels, observe: Observe | None
) -> dict[int, Data]:
    buffers = dict(sources)
    sizes = lowered.sizes_bytes

    def give_back(k: int) -> None:
        data = buffers.pop(k)
        if k >= 0:
            memory.give_back(k, data)

    for position, step in enumerate(lowered.instructions):
        if isinstance(step, Run):
            for k in step.takes:
                buffers[k] = memory.take(k, sizes[k])
            step.kernel(_arrays(step.inputs, buffers), _arrays(step.outputs, buffers), _arrays(step.scratch, buffers))
            if observe:
                observe(position)
            for k in step.drops:
                give_back(k)
            continue
        if isinstance(step, Drop):
            give_back(step.buffer)
        elif isinstance(step, Load):
            buffers[step.buffer] = memory.take(step.buffer, sizes[step.buffer])
            levels.load(step.storage, step.level, buffers[step.buffer])
        elif isinstance(step, Save):
            levels.save(step.storage, step.level, buffers[step.buffer])
        else:
            levels.forget(step.storage, step.level)
        if observe:
            observe(position)
    return buffers


class _Bound:
    """Instructions with their arrays built: what remains to do at run time."""

    def __init__(self, buffers: dict[int, Data], steps: list[tuple[Instruction, list[Data], list[Data], list[Data]]]) -> None:
        self.buffers, self.steps = buffers, steps


def _bind(lowered: Lowered, arena: Arena, sources: Mapping[int, Data]) -> _Bound:
    buffers = {**sources, **{k: arena.take(k, size) for k, size in enumerate(lowered.sizes_bytes)}}
    steps = []
    for step in lowered.instructions:
        slots = (step.inputs, step.outputs, step.scratch) if isinstance(step, Run) else ((), (), ())
        inputs, outputs, scratch = (_arrays(s, buffers) for s in slots)
        steps.append((step, inputs, outputs, scratch))
    return _Bound(buffers, steps)


def _run_bound(bound: _Bound, levels: _Levels, observe: Observe | None) -> None:
    for position, (step, inputs, outputs, scratch) in enumerate(bound.steps):
        if isinstance(step, Run):
            step.kernel(inputs, outputs, scratch)
        elif isinstance(step, Load):
            levels.load(step.storage, step.level, bound.buffers[step.buffer])
        elif isinstance(step, Save):
            levels.save(step.storage, step.level, bound.buffers[step.buffer])
        elif isinstance(step, Forget):
            levels.forget(step.storage, step.level)
        if observe:
            observe(position)


def evaluate(arrays: Sequence[Array], feeds: Mapping[Array, Data] | None = None) -> tuple[Data, ...]:
    """Run what these arrays need, every buffer dropped at its last reader and overwritten where that is legal."""
    program = compile_program(arrays)
    return Executor(program, drop_early(program.graph, inplace=True)).run(feeds)
