"""The judge: replays a schedule step by step, refuses an illegal one, and tells what it held and how long it took.

    steps     Compute(0)   Compute(1)   Offload(2)   Free(2)   Compute(3)   Reload(2)  ...
    device    ─── F0 ───────── F1 ──────────────────────────────── F3 ─────────────────>
    to host                                └── copy ──┘
    from host                                                                 └─ copy ─>

Ops run one after another; every level has one link out and one in, which overlap compute. Bytes are counted in step
order. Nothing here knows a planner; every plan is judged here before it is returned.

Rules that are easy to get wrong:
- a storage holds its bytes from the step that allocates it until its Free, whoever reads it or not;
- a Free that comes while a copy of that storage is under way waits for the copy, and so does an in-place overwrite;
- an op that runs again while one of its outputs is still there makes a second, scratch copy of it for that step alone;
- first runs of seeded ops keep op order, else a different random stream is drawn; replays may come anywhere;
- after Free and a new Compute only the op's own outputs are back: views of them must be made again;
- an in-place op whose output is still there lets the overwritten bytes go and keeps that output;
- sources that alone exceed the budget are refused at step 0, before anything ran.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add
from typing import NoReturn

from memfit.core.budget import Budget
from memfit.core.costs import DEVICE, Costs, check_costs, level_name, uniform_costs
from memfit.core.errors import IllegalSchedule
from memfit.core.graph import Graph, Kind
from memfit.core.op_forms import Form, form_of
from memfit.core.plan import Timeline
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step
from memfit.core.units import format_bytes

KINDS = tuple(Kind)
_TEMPORARY = KINDS.index(Kind.TEMPORARY)


def simulate(graph: Graph, schedule: Schedule, costs: Costs | None = None, budget: Budget | None = None) -> Timeline:
    """Judge `schedule`. Raises IllegalSchedule, naming the step and the cause; without `budget` any size is legal."""
    if costs is None:
        costs = uniform_costs(graph)
    check_costs(graph, costs)
    machine = _Machine(graph, costs, budget or Budget(), schedule.steps)
    run = {Compute: machine.compute, Free: machine.free, Offload: machine.offload, Reload: machine.reload}
    for machine.step, step in enumerate(schedule.steps):
        act = run.get(type(step))
        if act is None:
            machine.refuse(f"{str(step)[:60]!r} is not a step: Compute, Free, Offload or Reload is expected")
        act(step)  # type: ignore[operator]
    return machine.finish()


class _Machine:
    """The state of a replay. One method per kind of step."""

    def __init__(self, graph: Graph, costs: Costs, budget: Budget, steps: tuple[Step, ...]) -> None:
        self.graph, self.costs, self.steps = graph, costs, steps
        self.step = 0
        num_levels = 1 + len(costs.levels)
        self.limits = [budget.limit(level) for level in range(num_levels)]
        self.sizes = [s.size_bytes for s in graph.storages]
        position = {kind: k for k, kind in enumerate(KINDS)}
        self.kind_of = [position[s.kind] for s in graph.storages]
        self.resident = bytearray(len(graph.storages))
        self.valid = bytearray(len(graph.tensors))
        self.gone_at = [-1] * len(graph.storages)  # the step at which the device copy went
        self.overwritten = bytearray(len(graph.storages))  # whether it went by an in-place op
        self.ran = bytearray(len(graph.ops))
        self.last_draw = -1  # the latest seeded op that ran for the first time
        self.once_or_seeded = bytearray([op.seeded or not op.replayable for op in graph.ops])
        self.tensors_of = graph.tensors_of
        self.forms: dict[int, Form] = graph.known_forms[0]  # the ops as written; variants are rarer
        self.copies: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_levels)]  # storage -> tensors saved
        self.held = [0] * num_levels
        self.level_peak = [0] * num_levels
        self.change_of_kind = [[0] * (len(steps) + 1) for _ in KINDS]  # at each step, summed up at the end
        self.transient_at_step = [0] * len(steps)
        self.clock = self.compute_time = self.copy_time = self.last_copy_end = 0
        self.link_free: dict[tuple[int, bool], int] = {}
        self.arriving: dict[int, int] = {}  # storage -> end of its copy in: readers wait for it
        self.leaving: dict[int, int] = {}  # storage -> end of its copy out: Free and overwriting wait for it
        self.copy_ready: dict[tuple[int, int], int] = {}  # (storage, level) -> its copy is complete
        self.bytes_at_step: list[int] = []
        for tensor in graph.sources:
            if not self.resident[graph.storage_of(tensor)]:
                self._allocate(graph.storage_of(tensor), 0)
            self.valid[tensor] = 1
        self.peak, self.peak_step = self.held[DEVICE], -1
        self._check_limit(DEVICE, self.held[DEVICE], "the sources alone")

    # -- the four steps ------------------------------------------------------------------------------------------

    def compute(self, step: Compute) -> None:
        op, now, valid, resident = step.op, self.step, self.valid, self.resident
        if step.variant == 0 and op in self.forms:
            form, time_ns, transient = self.forms[op], self.costs.op_time_ns[op], self.costs.workspace_bytes[op]
        else:
            form, time_ns, transient = self._look_up(op, step.variant)
        for tensor in form.inputs:
            if not valid[tensor]:
                self._refuse_read(op, tensor)
        if self.once_or_seeded[op]:
            self._check_run(op)
        for storage, tensors in form.fresh:
            if resident[storage]:
                transient += self.sizes[storage]  # a second copy, for this step alone
            else:
                self._allocate(storage, now)
                for tensor in tensors:
                    valid[tensor] = 1
        self._record(transient)
        if self.arriving:
            for tensor in form.inputs:
                self.clock = max(self.clock, self.arriving.pop(self.graph.storage_of(tensor), 0))
        for new, old, tensors in form.takeovers:
            self._drop(old, now + 1)
            self.overwritten[old] = 1
            if not resident[new]:
                self._allocate(new, now + 1)
                for tensor in tensors:
                    valid[tensor] = 1
        for tensor in form.views:
            valid[tensor] = 1
        self.clock += time_ns
        self.compute_time += time_ns

    def free(self, step: Free) -> None:
        self._check_ids(step.storage, step.level)
        if step.level == DEVICE:
            if not self.resident[step.storage]:
                self.refuse(f"frees storage {step.storage}, which {self._fate(step.storage)}")
            self._drop(step.storage, self.step)
            self.overwritten[step.storage] = 0
        else:
            if step.storage not in self.copies[step.level]:
                self.refuse(f"frees storage {step.storage} on the {level_name(step.level)}, where there is no copy of it")
            self.clock = max(self.clock, self.copy_ready[step.storage, step.level])
            del self.copies[step.level][step.storage]
            self.held[step.level] -= self.sizes[step.storage]
        self._record(0)

    def offload(self, step: Offload) -> None:
        self._check_ids(step.storage, step.level, copying=True)
        if not self.resident[step.storage]:
            self.refuse(f"offloads storage {step.storage}, which {self._fate(step.storage)}")
        if step.storage in self.copies[step.level]:
            self.refuse(f"offloads storage {step.storage} to the {level_name(step.level)}, which already holds a copy")
        saved = tuple(t for t in self.graph.tensors_of[step.storage] if self.valid[t])
        self.copies[step.level][step.storage] = saved
        size = self.sizes[step.storage]
        self.held[step.level] += size
        self.level_peak[step.level] = max(self.level_peak[step.level], self.held[step.level])
        self._check_limit(step.level, self.held[step.level], f"the copy of storage {step.storage}")
        begin = max(self.clock, self.arriving.get(step.storage, 0))
        end = self._copy(step.level, False, begin, self.costs.levels[step.level - 1].write_ns(size))
        self.leaving[step.storage] = max(end, self.leaving.get(step.storage, 0))
        self.copy_ready[step.storage, step.level] = end
        self._record(0)

    def reload(self, step: Reload) -> None:
        self._check_ids(step.storage, step.level, copying=True)
        if step.storage not in self.copies[step.level]:
            self.refuse(f"reloads storage {step.storage} from the {level_name(step.level)}, to which it was never offloaded")
        if self.resident[step.storage]:
            self.refuse(f"reloads storage {step.storage}, which is still on the device")
        self._allocate(step.storage, self.step)
        for tensor in self.copies[step.level][step.storage]:
            self.valid[tensor] = 1
        begin = max(self.clock, self.copy_ready[step.storage, step.level])
        cost = self.costs.levels[step.level - 1].read_ns(self.sizes[step.storage])
        end = self._copy(step.level, True, begin, cost)
        self.arriving[step.storage] = self.copy_ready[step.storage, step.level] = end
        self._record(0)

    def finish(self) -> Timeline:
        self.step = -1
        for tensor in self.graph.results:
            if not self.valid[tensor]:
                self.refuse(f"never produces result tensor {tensor}: its storage {self._fate(self.graph.storage_of(tensor), tensor)}")
        self.level_peak[DEVICE] = self.peak
        by_kind = [list(accumulate(changes[:-1])) for changes in self.change_of_kind]
        by_kind[_TEMPORARY] = list(map(add, by_kind[_TEMPORARY], self.transient_at_step))
        return Timeline(
            bytes_at_step=tuple(self.bytes_at_step),
            peak_bytes=self.peak,
            peak_step=self.peak_step,
            time_ns=max(self.clock, self.last_copy_end),
            serial_time_ns=self.compute_time + self.copy_time,
            compute_time_ns=self.compute_time,
            kinds=KINDS,
            bytes_by_kind=tuple(map(tuple, by_kind)),
            level_peak_bytes=tuple(self.level_peak),
        )

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _look_up(self, op: int, variant: int) -> tuple[Form, int, int]:
        """A form with its time and workspace."""
        if not 0 <= op < len(self.graph.ops):
            self.refuse(f"computes op {op}, but the graph has {len(self.graph.ops)} ops")
        if not 0 <= variant <= len(self.graph.ops[op].variants):
            self.refuse(f"computes variant {variant} of {self._op(op)}, which has {len(self.graph.ops[op].variants)} variants")
        return form_of(self.graph, op, variant), self.costs.time_ns(op, variant), self.costs.workspace(op, variant)

    def _check_run(self, op: int) -> None:
        if self.ran[op]:
            if not self.graph.ops[op].replayable:
                self.refuse(f"{self._op(op)} ran before and cannot be replayed (it mutates something, or cannot be repeated)")
            return
        self.ran[op] = 1
        if self.graph.ops[op].seeded:
            if op < self.last_draw:
                self.refuse(f"{self._op(op)} draws random numbers after op {self.last_draw} did: first draws keep op order")
            self.last_draw = op

    def _allocate(self, storage: int, when: int) -> None:
        """The bytes count from step `when` on."""
        size = self.sizes[storage]
        self.resident[storage] = 1
        self.held[DEVICE] += size
        self.change_of_kind[self.kind_of[storage]][when] += size

    def _drop(self, storage: int, when: int) -> None:
        if self.leaving or self.arriving:
            self.clock = max(self.clock, self.leaving.pop(storage, 0), self.arriving.pop(storage, 0))
        size = self.sizes[storage]
        self.resident[storage] = 0
        self.held[DEVICE] -= size
        self.change_of_kind[self.kind_of[storage]][when] -= size
        self.gone_at[storage] = self.step
        for tensor in self.tensors_of[storage]:
            self.valid[tensor] = 0

    def _copy(self, level: int, inward: bool, begin: int, cost: int) -> int:
        end = max(begin, self.link_free.get((level, inward), 0)) + cost
        self.link_free[level, inward] = end
        self.copy_time += cost
        self.last_copy_end = max(self.last_copy_end, end)
        return end

    def _record(self, transient: int) -> None:
        total = self.held[DEVICE] + transient
        self.bytes_at_step.append(total)
        if transient:
            self.transient_at_step[self.step] = transient
        if total > self.peak:
            self.peak, self.peak_step = total, self.step
            limit = self.limits[DEVICE]
            if limit is not None and total > limit:
                self._check_limit(DEVICE, total, self._doing())

    def _check_limit(self, level: int, total: int, what: str) -> None:
        limit = self.limits[level]
        if limit is not None and total > limit:
            self.refuse(
                f"with {what} the {level_name(level)} holds {format_bytes(total)} ({total} bytes), "
                f"{total - limit} more than its budget of {format_bytes(limit)} ({limit} bytes)"
            )

    def _check_ids(self, storage: int, level: int, *, copying: bool = False) -> None:
        if not 0 <= storage < len(self.sizes):
            self.refuse(f"names storage {storage}, but the graph has {len(self.sizes)} storages")
        if not (1 if copying else 0) <= level < len(self.held):
            self.refuse(f"names memory level {level}, but the costs know levels {1 if copying else 0} to {len(self.held) - 1}")

    # -- words for errors ----------------------------------------------------------------------------------------

    def refuse(self, cause: str) -> NoReturn:
        raise IllegalSchedule(self.step, cause)

    def _refuse_read(self, op: int, tensor: int) -> NoReturn:
        storage = self.graph.storage_of(tensor)
        self.refuse(f"{self._op(op)} reads tensor {tensor} of storage {storage}, which {self._fate(storage, tensor)}")

    def _doing(self) -> str:
        step = self.steps[self.step]
        return self._op(step.op) if isinstance(step, Compute) else f"the reload of storage {step.storage}"

    def _op(self, op: int) -> str:
        where = self.graph.ops[op].where
        return f"op {op} ({self.graph.ops[op].name}{', ' + where if where else ''})"

    def _fate(self, storage: int, tensor: int | None = None) -> str:
        if self.resident[storage]:
            return f"is on the device, but its view tensor {tensor} was not made since"
        if self.gone_at[storage] < 0:
            return "was never computed"
        return f"was {'overwritten in place' if self.overwritten[storage] else 'freed'} at step {self.gone_at[storage]}"
