"""Processes that write Inductor's code: many regions at once, where one process would write them one after another.

    this process   regions as text ->                  <- 3 from the cache, 1 from the cache, ...
    writer 1                         code for 3, 5, ...
    writer 2                         code for 1, 2, ...

What a writer leaves behind is an entry of Inductor's own cache on disk: here the region compiles in the usual way and finds it.
A writer that fails costs time and nothing else.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from memfit.execute.inductor import Inductor, Settings, leave_kernels_out, num_found_on_disk, num_writers, writer_pool


class Piece(Protocol):
    """What is to be compiled: a `capture.region.Region`."""

    num_ops: int

    def source(self) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]: ...


P = TypeVar("P", bound=Piece)
_FEWEST = 8  # regions: fewer are written here before other processes have started
_AHEAD = 2  # jobs per writer, so that none waits for this process


def as_written(regions: Sequence[P]) -> Iterator[P]:
    """The regions, each when its code has been written elsewhere; while none is ready, the smallest, to be written by the caller.

    One comes first to show whether code is on disk already: then all come as they are, and no process is started.
    """
    if len(regions) < _FEWEST or num_writers() < 2:
        yield from regions
        return
    todo = deque(sorted(regions, key=lambda r: -r.num_ops))
    middle = todo[len(todo) // 2]
    todo.remove(middle)
    found_before = num_found_on_disk()
    yield middle
    if num_found_on_disk() > found_before:
        yield from todo
        return
    settings, jobs = Settings.here(), dict[Future[None], P]()
    while todo or jobs:
        while todo and len(jobs) < _AHEAD * num_writers():
            region = todo.popleft()
            job = _submitted(region, settings)
            if job is None:
                yield region
            else:
                jobs[job] = region
        done = [job for job in jobs if job.done()]
        if not done and todo:
            yield todo.pop()
        for job in done or (wait(jobs, return_when=FIRST_COMPLETED).done if jobs and not todo else ()):
            yield jobs.pop(job)


def _submitted(region: Piece, settings: Settings) -> Future[None] | None:
    """The job of writing it; None where it cannot be sent or nobody is there."""
    text = Text.of(*region.source())
    try:
        return None if text is None else writer_pool().submit(write, text, settings)
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
    if "." not in name or name.startswith("<"):
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
