"""A second judge, written from the rules alone: slow, obvious, and sharing no code with `core.simulate`.

It keeps the whole history instead of running totals. What is held at a step is found by looking at every value that
ever came to be; when a copy ends is found by looking at every earlier copy. O(n^2) throughout, which is the point:
a bookkeeping slip in the fast judge has no counterpart here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule


class Refused(Exception):
    """`step` is the position of the illegal step, -1 the end."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(step)


@dataclass(slots=True)
class Life:
    """One stay of a storage in one level: it holds bytes during the steps [begin, end)."""

    storage: int
    level: int
    begin: int
    end: int | None = None
    tensors: set[int] = field(default_factory=set)  # the readable values; for a level, what was saved
    readable_from_ns: int = 0  # when the copy that brought it has arrived


@dataclass(slots=True)
class CopyJob:
    storage: int
    level: int
    inward: bool
    start_ns: int
    end_ns: int
    source: Life
    target: Life


@dataclass(frozen=True, slots=True)
class Seen:
    """What the naive judge saw, in the fast judge's terms."""

    bytes_at_step: tuple[int, ...]
    by_kind: dict[str, tuple[int, ...]]
    level_peaks: tuple[int, ...]
    peak_step: int
    time_ns: int
    serial_time_ns: int
    compute_time_ns: int


class NaiveJudge:
    def __init__(self, graph: Graph, costs: Costs, budget: Budget) -> None:
        self.graph, self.costs, self.budget = graph, costs, budget
        self.lives: list[Life] = []
        self.jobs: list[CopyJob] = []
        self.computed: list[int] = []
        self.durations: list[int] = []
        self.scratch: dict[int, int] = {}  # step -> workspace and second copies
        self.clock = 0
        for t in graph.sources:
            self._make_readable(t, 0)

    def judge(self, schedule: Schedule) -> Seen:
        self._check_budget(0, self._bytes(0, 0, "sources"), 0)
        for i, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                self._compute(i, step)
            elif isinstance(step, Free):
                self._free(i, step)
            elif isinstance(step, Offload):
                self._offload(i, step)
            else:
                self._reload(i, step)
            for level in range(1 + len(self.costs.levels)):
                self._check_budget(level, self._bytes(i, level), i)
        for t in self.graph.results:
            life = self._here(self.graph.tensors[t].storage, 0)
            if life is None or t not in life.tensors:
                raise Refused(-1)
        return self._summary(len(schedule.steps))

    # -- steps -----------------------------------------------------------------------------------------------------

    def _compute(self, i: int, step: Compute) -> None:
        if step.op not in range(len(self.graph.ops)):
            raise Refused(i)
        op = self.graph.ops[step.op]
        if step.variant not in range(1 + len(op.variants)):
            raise Refused(i)
        form = op if step.variant == 0 else op.variants[step.variant - 1]
        for t in form.inputs:
            life = self._here(self.graph.tensors[t].storage, 0)
            if life is None or t not in life.tensors:
                raise Refused(i)
        if step.op in self.computed and not op.replayable:
            raise Refused(i)
        if op.seeded and step.op not in self.computed and any(self.graph.ops[o].seeded and o > step.op for o in self.computed):
            raise Refused(i)
        self.computed.append(step.op)
        if step.variant == 0:
            time, workspace = self.costs.op_time_ns[op.id], self.costs.workspace_bytes[op.id]
        else:
            time = self.costs.variant_time_ns[op.id][step.variant - 1]
            workspace = self.costs.variant_workspace_bytes[op.id][step.variant - 1]

        begin = self.clock
        input_lives = [self._here(self.graph.tensors[t].storage, 0) for t in form.inputs]
        overwritten = [self._here(self.graph.tensors[old].storage, 0) for _, old in form.inplace_of]
        begin = max([begin, *(x.readable_from_ns for x in input_lives), *(self._busy_until(x) for x in overwritten)])

        already_there = {x.storage for x in self.lives if x.level == 0 and x.end is None}
        input_storages = {self.graph.tensors[t].storage for t in form.inputs}
        inplace_storages = {self.graph.tensors[new].storage for new, _ in form.inplace_of}
        second_copies = set()
        for t in form.outputs:
            storage = self.graph.tensors[t].storage
            if storage in input_storages:
                self._here(storage, 0).tensors.add(t)
            elif storage in inplace_storages:
                if storage not in already_there:
                    self._make_readable(t, i + 1)
            elif storage in already_there:
                second_copies.add(storage)
            else:
                self._make_readable(t, i)
        for life in overwritten:
            life.end = i + 1
        self.scratch[i] = workspace + sum(self.graph.storages[s].size_bytes for s in second_copies)
        self.durations.append(time)
        self.clock = begin + time

    def _free(self, i: int, step: Free) -> None:
        self._check_names(i, step.storage, step.level, 0)
        life = self._here(step.storage, step.level)
        if life is None:
            raise Refused(i)
        self.clock = max(self.clock, self._busy_until(life))
        life.end = i

    def _offload(self, i: int, step: Offload) -> None:
        self._check_names(i, step.storage, step.level, 1)
        source = self._here(step.storage, 0)
        if source is None or self._here(step.storage, step.level) is not None:
            raise Refused(i)
        target = Life(step.storage, step.level, i, tensors=set(source.tensors))
        self.lives.append(target)
        level = self.costs.levels[step.level - 1]
        self._copy(source, target, False, self._copy_time(source, level.write_latency_ns, level.write_bytes_per_s))

    def _reload(self, i: int, step: Reload) -> None:
        self._check_names(i, step.storage, step.level, 1)
        source = self._here(step.storage, step.level)
        if source is None or self._here(step.storage, 0) is not None:
            raise Refused(i)
        target = Life(step.storage, 0, i, tensors=set(source.tensors))
        self.lives.append(target)
        level = self.costs.levels[step.level - 1]
        self._copy(source, target, True, self._copy_time(source, level.read_latency_ns, level.read_bytes_per_s))

    # -- looking at the history -------------------------------------------------------------------------------------

    def _here(self, storage: int, level: int) -> Life | None:
        found = [x for x in self.lives if x.storage == storage and x.level == level and x.end is None]
        assert len(found) <= 1
        return found[0] if found else None

    def _make_readable(self, tensor: int, begin: int) -> None:
        storage = self.graph.tensors[tensor].storage
        life = self._here(storage, 0)
        if life is None:
            life = Life(storage, 0, begin)
            self.lives.append(life)
        life.tensors.add(tensor)

    def _busy_until(self, life: Life) -> int:
        """A stay ends only when every copy that reads or writes it is complete."""
        return max([job.end_ns for job in self.jobs if job.source is life or job.target is life], default=0)

    def _copy_time(self, life: Life, latency_ns: int, bytes_per_s: float) -> int:
        size = self.graph.storages[life.storage].size_bytes
        return latency_ns + (round(size * 1e9 / bytes_per_s) if bytes_per_s else 0)

    def _copy(self, source: Life, target: Life, inward: bool, duration: int) -> None:
        level = source.level or target.level
        same_link = [job.end_ns for job in self.jobs if job.level == level and job.inward == inward]
        start = max([self.clock, source.readable_from_ns, *same_link])
        target.readable_from_ns = start + duration
        self.jobs.append(CopyJob(source.storage, level, inward, start, start + duration, source, target))

    def _check_names(self, i: int, storage: int, level: int, least: int) -> None:
        if storage not in range(len(self.graph.storages)) or level not in range(least, 1 + len(self.costs.levels)):
            raise Refused(i)

    def _bytes(self, i: int, level: int, kind: str = "") -> int:
        held = [x for x in self.lives if x.level == level and x.begin <= i and (x.end is None or x.end > i)]
        if kind not in ("", "sources"):
            held = [x for x in held if self.graph.storages[x.storage].kind == kind]
        extra = self.scratch.get(i, 0) if level == 0 and kind in ("", "temporary") else 0
        return sum(self.graph.storages[x.storage].size_bytes for x in held) + extra

    def _check_budget(self, level: int, held: int, i: int) -> None:
        limits = [self.budget.device_bytes, self.budget.host_bytes, self.budget.disk_bytes, *self.budget.deeper_bytes]
        limit = limits[level] if level < len(limits) else None
        if limit is not None and held > limit:
            raise Refused(i)

    def _summary(self, num_steps: int) -> Seen:
        bytes_at_step = tuple(self._bytes(i, 0) for i in range(num_steps))
        kinds = ("parameter", "gradient", "optimizer", "input", "buffer", "activation", "temporary")
        at_start = sum(self.graph.storages[s].size_bytes for s in {self.graph.tensors[t].storage for t in self.graph.sources})
        peak = max((at_start, *bytes_at_step))
        below = tuple(max((self._bytes(i, level) for i in range(num_steps)), default=0) for level in range(1, 1 + len(self.costs.levels)))
        return Seen(
            bytes_at_step=bytes_at_step,
            by_kind={kind: tuple(self._bytes(i, 0, kind) for i in range(num_steps)) for kind in kinds},
            level_peaks=(peak, *below),
            peak_step=-1 if peak == at_start else bytes_at_step.index(peak),
            time_ns=max([self.clock, *(job.end_ns for job in self.jobs)]),
            serial_time_ns=sum(self.durations) + sum(job.end_ns - job.start_ns for job in self.jobs),
            compute_time_ns=sum(self.durations),
        )
