"""Processes that write Inductor's code: many regions at once, where one process would write them one after another.

    this process   regions as text ->                  <- 3 from the cache, 1 from the cache, ...
    writer 1                         code for 3, 5, ...
    writer 2                         code for 1, 2, ...

What a writer leaves behind is an entry of Inductor's own cache on disk: here the region compiles in the usual way and finds it.
A writer that fails costs time and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from memfit.execute.inductor import Inductor, Settings, leave_kernels_out, num_found_on_disk, writer_pool


class Piece(Protocol):
    """What is to be compiled: a `capture.region.Region`."""

    num_ops: int

    def source(self) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]: ...


P = TypeVar("P", bound=Piece)
_FEWEST = 8  # regions: fewer are written here before other processes have started


def as_written(regions: Sequence[P]) -> Iterator[P]:
    """The regions, each when its code has been written elsewhere; as they come where that would not pay.

    One is compiled by the caller first: if its code was on disk already, so is everybody's.
    """
    pool = writer_pool() if len(regions) >= _FEWEST else None
    if pool is None:
        yield from regions
        return
    largest_first = sorted(regions, key=lambda r: -r.num_ops)
    found_before = num_found_on_disk()
    yield largest_first.pop(len(regions) // 2)
    if num_found_on_disk() > found_before:
        yield from largest_first
        return
    settings = Settings.here()
    jobs: dict[Future[None], P] = {}
    for region in largest_first:
        text = Text.of(*region.source())
        if text is None:
            yield region
            continue
        try:
            jobs[pool.submit(write, text, settings)] = region
        except RuntimeError:  # the pool is gone
            yield region
    while jobs:
        for done in wait(jobs, return_when=FIRST_COMPLETED).done:
            yield jobs.pop(done)


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
