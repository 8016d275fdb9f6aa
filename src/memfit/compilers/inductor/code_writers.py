"""Processes that write Inductor's code: many regions at once, where one process would write them one after another.

    this process   regions as text ->                  <- 3 from the cache, 1 from the cache, ...
    writer 1                         code for 3, 5, ...
    writer 2                         code for 1, 2, ...

A writer leaves an entry in Inductor's own cache on disk: here the region compiles in the usual way, finds the entry, and has its
kernels built. A writer that fails costs time and nothing else.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from memfit.compilers.inductor import private
from memfit.compilers.inductor.compiler import Inductor
from memfit.compilers.inductor.settings import Settings
from memfit.compilers.inductor.writer_pool import end_writer_pool, num_writers, writer_pool
from memfit.passes.regions.piece import Piece
from memfit.torch_private.fake import fake_mode
from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.tensors import is_op

_LONG_S = 30  # of work left: less is done here before new processes have imported torch
_LOOK_S = 3  # of work, before the pace is known
_ENOUGH = 4  # writers: with fewer cores this process needs them itself while it traces
_AHEAD = 2  # jobs per writer, so that none waits for this process
_MOMENT_S = 0.05
_PATIENCE_S = 5  # with writers at the last regions, before these are written here too


def yield_written(pieces: Sequence[Piece], meanwhile: Callable[[], Any] = lambda: None) -> Iterator[Piece]:
    """The pieces, for the caller to compile one by one: any whose code a writer has finished, else the smallest.

    Writers have the largest. Where none are awake they are started when the pace so far says that the rest takes long. The last
    pieces are waited for, not long, and `meanwhile` is called until one comes.
    """
    todo, jobs = deque(sorted(pieces, key=lambda p: -p.num_ops)), dict[Future[None], Piece]()
    writers = _WRITERS if num_writers() >= 2 else None
    pace, patience_s = _Pace(), float(_PATIENCE_S)
    while todo or jobs:
        while writers is not None and writers.are_ready and todo and len(jobs) < _AHEAD * num_writers():
            piece = todo.popleft()
            job = writers.submit(piece)
            if job is None:
                yield piece
            else:
                jobs[job] = piece
        finished = next((job for job in jobs if job.done()), None)
        if finished is not None:
            yield jobs.pop(finished)
            continue
        if not todo and len(jobs) <= num_writers() and patience_s > 0:  # all are being written
            meanwhile()
            if not wait(jobs, timeout=_MOMENT_S, return_when=FIRST_COMPLETED).done:
                patience_s -= _MOMENT_S
            continue
        piece = todo.pop() if todo else jobs.pop(next(reversed(jobs)))
        begin = time.perf_counter()
        yield piece
        pace.add(_work(piece), time.perf_counter() - begin)
        if writers is not None and pace.is_long(sum(map(_work, todo))):
            writers.wake()


def _work(piece: Piece) -> int:
    """In proportion to the time that compiling takes: ops, and about five more to begin."""
    return piece.num_ops + 5


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

    def wake(self, first: GraphText | None = None) -> None:
        """Every writer writes `first`: the first graph of a process takes longest."""
        if self._waking:
            return
        self.settings = Settings.here()
        with suppress(RuntimeError, OSError):
            pool = writer_pool()
            self._waking = [pool.submit(start_writer, self.settings, first) for _ in range(num_writers())]

    @property
    def are_ready(self) -> bool:
        return any(job.done() and job.exception() is None for job in self._waking)

    def submit(self, piece: Piece) -> Future[None] | None:
        """The job of writing its code; None where it cannot be sent or nobody is there."""
        text = GraphText.of(*piece.source())
        try:
            return None if text is None else writer_pool().submit(write_code, text, self.settings)
        except (RuntimeError, OSError):
            return None

    def end(self) -> None:
        self._waking = []
        end_writer_pool()


_WRITERS = _Writers()  # one set of processes, over all steps


def wake_writers(device: torch.device) -> None:
    """For a step that is about to be traced and whose regions have never been compiled here. On the CPU cores build kernels too."""
    if device.type == "cuda" and num_writers() >= _ENOUGH:
        _WRITERS.wake(_write_small_graph(device))


def end_writers() -> None:
    """Once a step is ready: nobody stays behind for it."""
    _WRITERS.end()


def start_writer(settings: Settings, first: GraphText | None) -> None:
    """In a writer's process: import what writing needs, by writing something."""
    settings.apply()
    if first is not None:
        write_code(first, settings)


def write_code(text: GraphText, settings: Settings) -> None:
    """In a writer's process: compile and forget. Kernels for the GPU are built where they run, so a writer takes nothing of its memory."""
    settings.apply()
    with patch_torch("write code in several processes", Patch(private.async_compile(), "triton", lambda *_, **__: None)):
        Inductor().compile(*text.read())


def _write_small_graph(device: torch.device) -> GraphText | None:
    """A reduction and what follows it, for a writer to begin with."""
    graph = torch.fx.Graph()
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (graph.placeholder("x"), [0]))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (total,)),))
    text = GraphText.of(torch.fx.GraphModule(torch.nn.Module(), graph), [])
    return None if text is None else replace(text, samples=((torch.Size([4096, 64]), (64, 1), torch.float32, device),))


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the node at this place of the graph."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphText:
    """An fx graph of ops of torch and its inputs, as values that can be sent. (fx itself sends code and traces it again, which runs constants.)"""

    nodes: tuple[tuple[str, str, str, Any, Any], ...]
    samples: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]

    @staticmethod
    def of(module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> GraphText | None:
        """None for a graph that calls anything else."""
        nodes = list(module.graph.nodes)
        if not all(isinstance(n.target, str) or is_op(n.target) or n.target is operator.getitem for n in nodes):
            return None
        places = {node: _Place(k) for k, node in enumerate(nodes)}

        def replace_node(value: Any) -> Any:
            return places[value] if isinstance(value, torch.fx.Node) else value

        return GraphText(
            nodes=tuple(
                (n.op, n.name, str(n.target), map_aggregate(n.args, replace_node), map_aggregate(n.kwargs, replace_node)) for n in nodes
            ),
            samples=tuple((s.shape, s.stride(), s.dtype, s.device) for s in samples),
        )

    def read(self) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
        graph, made = torch.fx.Graph(), list[torch.fx.Node]()

        def find_node(value: Any) -> Any:
            return made[value.number] if isinstance(value, _Place) else value

        for op, name, target, args, kwargs in self.nodes:
            what = _find_op(target) if op == "call_function" else target
            made.append(graph.create_node(op, what, map_aggregate(args, find_node), map_aggregate(kwargs, find_node), name))
        with fake_mode():
            samples = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in self.samples]
        return torch.fx.GraphModule(torch.nn.Module(), graph), samples


def _find_op(name: str) -> Any:
    if name == str(operator.getitem):
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
