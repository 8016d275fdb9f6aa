"""Processes that write Inductor's code: many regions at once, where one process would write them one after another.

    this process   regions as text ->                  <- 3 from the cache, 1 from the cache, ...
    writer 1                         code for 3, 5, ...
    writer 2                         code for 1, 2, ...

What a writer leaves behind is an entry of Inductor's own cache on disk: here the region compiles in the usual way and finds it.
A writer that fails costs time and nothing else.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from memfit.execute.inductor import Inductor, Settings, leave_kernels_out, num_writers, writer_pool


class Piece(Protocol):
    """What is to be compiled: a `capture.region.Region`."""

    num_ops: int

    def source(self) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]: ...


P = TypeVar("P", bound=Piece)
_LONG_S = 30  # of work left: for less it is done here before other processes have imported torch
_LOOK_S = 3  # of work, before how much is left can be told
_AHEAD = 2  # jobs per writer, so that none waits for this process


def as_written(regions: Sequence[P]) -> Iterator[P]:
    """The regions, to be compiled by the caller one by one: the smallest first, and any whose code was written elsewhere meanwhile.

    Writers are started when the pace so far says that it will take long. Nobody is waited for: what a writer has not finished
    when nothing else is left is written here too.
    """
    todo, jobs = deque(sorted(regions, key=lambda r: -r.num_ops)), dict[Future[None], P]()
    writers = Writers(left=lambda: sum(map(_work, todo))) if num_writers() >= 2 else None
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
        region = todo.pop() if todo else jobs.pop(next(reversed(jobs)))
        begin = time.perf_counter()
        yield region
        if writers is not None:
            writers.look(_work(region), time.perf_counter() - begin)


def _work(region: Piece) -> int:
    """In proportion to the time it takes: ops, and about five more for beginning."""
    return region.num_ops + 5


class Writers:
    """The processes, from the moment they are worth starting. `left` tells how much work has not been given to anybody."""

    def __init__(self, left: Callable[[], int]) -> None:
        self.left = left
        self.settings: Settings | None = None
        self._done, self._done_s = 0, 0.0
        self._awake: Future[None] | None = None

    def look(self, work: int, seconds: float) -> None:
        """After so much was compiled here: start the processes if the rest will take long."""
        self._done, self._done_s = self._done + work, self._done_s + seconds
        if self._awake is None and self._done_s >= _LOOK_S and self._done_s / self._done * self.left() >= _LONG_S:
            self.settings = Settings.here()
            with suppress(RuntimeError, OSError):
                self._awake = writer_pool().submit(self.settings.apply)  # imports what writing needs

    @property
    def are_ready(self) -> bool:
        return self._awake is not None and self._awake.done() and self._awake.exception() is None

    def submit(self, region: Piece) -> Future[None] | None:
        """The job of writing it; None where it cannot be sent or nobody is there."""
        text = Text.of(*region.source())
        try:
            return None if text is None else writer_pool().submit(write, text, self.settings)
        except (RuntimeError, OSError):
            return None


def write(text: Text, settings: Settings) -> None:
    """In a writer's process: compile and forget."""
    settings.apply()
    leave_kernels_out()
    Inductor().compile(*text.read())


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
