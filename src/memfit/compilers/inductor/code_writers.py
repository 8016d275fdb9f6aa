"""Processes that write Inductor's code: many regions at once, where one process would write them one after another.

    this process   regions as text ->                  <- 3 from the cache, 1 from the cache, ...
    writer 1                         code for 3, 5, ...
    writer 2                         code for 1, 2, ...

What a writer leaves behind is an entry of Inductor's own cache on disk: here the region compiles in the usual way, finds it, and
has its kernels built. A writer that fails costs time and nothing else.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from memfit.compilers.inductor.compiler import Inductor, Settings, end_writer_pool, leave_kernels_out, num_writers, writer_pool


class Piece(Protocol):
    """What is to be compiled: a `capture.region.Region`."""

    num_ops: int

    def source(self) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]: ...


P = TypeVar("P", bound=Piece)
_LONG_S = 30  # of work left: for less it is done here before processes that are not started yet have imported torch
_LOOK_S = 3  # of work, before how much is left can be told
_ENOUGH = 4  # writers: with fewer cores this process needs them itself while it traces
_AHEAD = 2  # jobs per writer, so that none waits for this process
_MOMENT_S = 0.05
_PATIENCE_S = 5  # with writers at the last regions, before these are written here too


def as_written(regions: Sequence[P], meanwhile: Callable[[], Any] = lambda: None) -> Iterator[P]:
    """The regions, to be compiled by the caller one by one: any whose code was written elsewhere meanwhile, else the smallest.

    Writers have the largest. Where none are awake they are started when the pace so far says that it will take long. The last
    regions are waited for, not long, and `meanwhile` is called until one comes.
    """
    todo, jobs = deque(sorted(regions, key=lambda r: -r.num_ops)), dict[Future[None], P]()
    writers = _WRITERS if num_writers() >= 2 else None
    pace, patience_s = _Pace(), float(_PATIENCE_S)
    while todo or jobs:
        while writers is not None and writers.are_ready and todo and len(jobs) < _AHEAD * num_writers():
            region = todo.popleft()
            job = writers.submit(region)
            if job is None:
                yield region
            else:
                jobs[job] = region
        finished = next((job for job in jobs if job.done()), None)
        if finished is not None:
            yield jobs.pop(finished)
            continue
        if not todo and len(jobs) <= num_writers() and patience_s > 0:  # all are being written
            meanwhile()
            if not wait(jobs, timeout=_MOMENT_S, return_when=FIRST_COMPLETED).done:
                patience_s -= _MOMENT_S
            continue
        region = todo.pop() if todo else jobs.pop(next(reversed(jobs)))
        begin = time.perf_counter()
        yield region
        pace.add(_work(region), time.perf_counter() - begin)
        if writers is not None and pace.is_long(sum(map(_work, todo))):
            writers.wake()


def _work(region: Piece) -> int:
    """In proportion to the time it takes: ops, and about five more for beginning."""
    return region.num_ops + 5


class _Pace:
    """How fast this process compiles."""

    def __init__(self) -> None:
        self._work, self._seconds = 0, 0.0

    def add(self, work: int, seconds: float) -> None:
        self._work, self._seconds = self._work + work, self._seconds + seconds

    def is_long(self, left: int) -> bool:
        return self._seconds >= _LOOK_S and self._seconds / self._work * left >= _LONG_S


class _Writers:
    """The processes, from the moment they are woken."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self._waking: list[Future[None]] = []

    def wake(self, first: Text | None = None) -> None:
        """Every writer writes `first`, so that the next is not the first in its process."""
        if self._waking:
            return
        self.settings = Settings.here()
        with suppress(RuntimeError, OSError):
            pool = writer_pool()
            self._waking = [pool.submit(begin, self.settings, first) for _ in range(num_writers())]

    @property
    def are_ready(self) -> bool:
        return any(job.done() and job.exception() is None for job in self._waking)

    def submit(self, region: Piece) -> Future[None] | None:
        """The job of writing it; None where it cannot be sent or nobody is there."""
        text = Text.of(*region.source())
        try:
            return None if text is None else writer_pool().submit(write, text, self.settings)
        except (RuntimeError, OSError):
            return None

    def end(self) -> None:
        self._waking = []
        end_writer_pool()


_WRITERS = _Writers()  # one set of processes, over all steps


def wake_writers(device: torch.device) -> None:
    """For a step that is about to be traced and whose regions have never been compiled here. On the CPU cores build kernels too."""
    if device.type == "cuda" and num_writers() >= _ENOUGH:
        _WRITERS.wake(_first_text(device))


def end_writers() -> None:
    """Once a step is ready: nobody stays behind for it."""
    _WRITERS.end()


def begin(settings: Settings, first: Text | None) -> None:
    """In a writer's process."""
    settings.apply()
    if first is not None:
        write(first, settings)


def write(text: Text, settings: Settings) -> None:
    """In a writer's process: compile and forget."""
    settings.apply()
    leave_kernels_out()
    Inductor().compile(*text.read())


def _first_text(device: torch.device) -> Text | None:
    """A reduction and what follows it."""
    graph = torch.fx.Graph()
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (graph.placeholder("x"), [0]))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (total,)),))
    text = Text.of(torch.fx.GraphModule(torch.nn.Module(), graph), [])
    return None if text is None else replace(text, samples=((torch.Size([4096, 64]), (64, 1), torch.float32, device),))


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the node at this place of the graph."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """An fx graph of ops of torch and its inputs, as values that can be sent. (fx itself sends code and traces it again, which runs constants.)"""

    nodes: tuple[tuple[str, str, str, Any, Any], ...]
    samples: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]

    @staticmethod
    def of(module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Text | None:
        """None for a graph that calls anything else."""
        nodes = list(module.graph.nodes)
        if not all(isinstance(n.target, (str, torch._ops.OpOverload)) or n.target is operator.getitem for n in nodes):
            return None
        places = {node: _Place(k) for k, node in enumerate(nodes)}

        def sent(value: Any) -> Any:
            return places[value] if isinstance(value, torch.fx.Node) else value

        return Text(
            nodes=tuple((n.op, n.name, str(n.target), map_aggregate(n.args, sent), map_aggregate(n.kwargs, sent)) for n in nodes),
            samples=tuple((s.shape, s.stride(), s.dtype, s.device) for s in samples),
        )

    def read(self) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
        graph, made = torch.fx.Graph(), list[torch.fx.Node]()

        def received(value: Any) -> Any:
            return made[value.number] if isinstance(value, _Place) else value

        for op, name, target, args, kwargs in self.nodes:
            what = _op_named(target) if op == "call_function" else target
            made.append(graph.create_node(op, what, map_aggregate(args, received), map_aggregate(kwargs, received), name))
        with FakeTensorMode():
            samples = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in self.samples]
        return torch.fx.GraphModule(torch.nn.Module(), graph), samples


def _op_named(name: str) -> Any:
    if name == str(operator.getitem):
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
