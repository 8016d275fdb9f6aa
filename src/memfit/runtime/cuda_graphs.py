"""A planned step recorded as two CUDA graphs, forward and backward, and replayed: the same kernels without Python between them.

    recorded once    forward  ─ graph 1 ┐ one pool: as high as the plan, since the first thing recorded is a block of that height,
                     backward ─ graph 2 ┘ which is split as the step's allocations come
    every step       inputs ─> copied to where graph 1 reads ─> replay ─> outputs;  tangents ─> copied ─> replay ─> .grad

Gradients and outputs are tensors of the pool: the next replay writes over them. So a step is replayed only while nobody holds those of
the one before, and called as usual otherwise; likewise when a second forward comes before the first one's backward.
Where in the flow: the stepper records a shape whose first steps went well, and makes a Replayed instead of a Session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from memfit.core.errors import Unsupported
from memfit.core.schedule import Offload
from memfit.core.units import format_bytes
from memfit.runtime.autograd_step import TWICE, Ready, update_sources
from memfit.runtime.gradients import GradientSink, Tangents, lay_out_gradient, match_layouts
from memfit.runtime.rng import RandomStates
from memfit.runtime.versions import Versions
from memfit.torch_private.cuda import clear_cublas_workspaces
from memfit.torch_private.tensors import disable_autocast, storage_key, storage_uses

_T = TypeVar("_T")
_SMALL_BYTES = 2**20
"""Outputs up to here are copied for the caller, who may keep a loss for as long as they like."""


class Recorder(Protocol):
    """Records work on a device: the work's results, and what does it again into the same tensors."""

    def record(self, work: Callable[[], _T]) -> tuple[Callable[[], None], _T]: ...


class CudaGraphs:
    """A recorder of CUDA graphs that share a pool. `room_bytes` is what they will need together, taken in one piece."""

    def __init__(self, device: torch.device, room_bytes: int) -> None:
        self.device, self.room_bytes = device, room_bytes
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        clear_cublas_workspaces()  # recorded products take one of their own, in the pool

    def record(self, work: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            torch.empty(self.room_bytes, dtype=torch.uint8, device=self.device)
            made = work()
        self.room_bytes = 0
        return graph.replay, made


def cuda_graphs_for(ready: Ready) -> CudaGraphs:
    """With room for all that the plan holds besides what the caller does."""
    return CudaGraphs(ready.captured.device, ready.room_bytes)


class Recording:
    """The graphs of one plan over one set of parameters, the tensors they read and write, and whose turn it is."""

    def __init__(self, ready: Ready, sources: Sequence[torch.Tensor], recorder: Recorder) -> None:
        refuse_unrecordable(ready)
        self.ready, self.captured = ready, ready.captured
        convention = self.captured.convention
        changing = {position for position, _ in convention.mutations}
        first = convention.num_parameters + convention.num_buffers
        self.copied = [i for i in range(first, len(sources)) if i not in changing]
        self.read = list(sources)  # by the graphs: the caller's own tensors where they lie, and copies of inputs
        for i in self.copied:
            self.read[i] = _twin(sources[i]).copy_(sources[i].detach())
        self.addresses = [(i, t.data_ptr()) for i, t in enumerate(sources) if i not in set(self.copied)]
        self.tangents = [_twin(t) for t in (self.captured.samples[i] for i in convention.tangents) if t is not None]
        self._saved: list[Any] = []
        self._read_again: list[torch.Tensor] = []
        self._rng = RandomStates(self.captured.device)
        with torch.no_grad(), disable_autocast():  # the casts are in the plan
            self._forward, self.outputs = recorder.record(self._record_forward)
            self._backward, self.gradients = recorder.record(self._record_backward)
        self._uses = [(key, storage_uses(key)) for key in map(storage_key, (*self.outputs, *self.gradients.values()))]
        self._latest: weakref.ref[Replayed] | None = None

    def _record_forward(self) -> list[torch.Tensor]:
        given = [*self.read, *self.captured.convention.constants]
        outputs, mutations, self._saved = self.ready.program.forward(given, self._rng, None)
        update_sources(self.captured, self.read, mutations)
        kept = {storage_key(t) for t in self._saved}
        self._read_again = [o for o in outputs if storage_key(o) in kept]
        return outputs

    def _record_backward(self) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}

        def put(position: int, gradient: torch.Tensor, keeps: bool) -> None:
            found[position] = lay_out_gradient(self.read[position], gradient, keeps)

        assert self.ready.program.backward is not None
        self.ready.program.backward(self._saved, list(self.tangents), put, self._rng, None)
        return found

    def __str__(self) -> str:
        device = self.captured.device
        reserved = f", {format_bytes(torch.cuda.memory_reserved(device))} reserved" if device.type == "cuda" else ""
        return f"replayed from CUDA graphs{reserved}"

    def serves(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether parameters and buffers lie where they did when it was recorded."""
        return all(sources[i].data_ptr() == address for i, address in self.addresses)

    @property
    def is_free(self) -> bool:
        """Whether the step before is over, and nobody holds what it made."""
        latest = self._latest() if self._latest is not None else None
        return (latest is None or latest.done) and all(storage_uses(key) == count for key, count in self._uses)

    def begin(self, session: Replayed) -> list[torch.Tensor]:
        self._latest = weakref.ref(session)
        for i in self.copied:
            self.read[i].copy_(session.sources[i].detach(), non_blocking=True)
        self._forward()
        return [o.clone() if o.nbytes <= _SMALL_BYTES else o.detach() for o in self.outputs]

    @property
    def watched(self) -> list[torch.Tensor]:
        """What backward reads of the caller's own tensors and of the outputs."""
        own = (i for i in self.ready.program.saved if i is not None and i not in self.copied)
        return [*(self.read[i] for i in own if i < len(self.read) and i not in self.captured.rereads), *self._read_again]

    def finish(self, tangents: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        for place, given in zip(self.tangents, tangents, strict=True):
            place.copy_(given, non_blocking=True)
        self._backward()
        return self.gradients


class Replayed:
    """The life of one forward and its backward, replayed: what `Session` is to a step that is called."""

    def __init__(self, recording: Recording, sources: tuple[torch.Tensor, ...]) -> None:
        self.recording, self.sources, self.captured = recording, sources, recording.captured
        self.done = False

    def reached_from(self) -> Mapping[int, frozenset[int]]:
        return self.recording.ready.program.reached_from

    def forward(self) -> list[torch.Tensor]:
        made = self.recording.begin(self)
        self.versions = Versions(self.captured, self.sources, self.recording.watched)
        return made

    def backward(self, tangents: Tangents, sink: GradientSink) -> None:
        if self.done:
            raise Unsupported(TWICE)
        self.versions.require_same(self.recording.watched)
        self.done = True
        for position, gradient in self.recording.finish(match_layouts(self.captured, tangents)).items():
            sink.put(position, gradient.detach(), True)


def refuse_unrecordable(ready: Ready) -> None:
    if any(isinstance(step, Offload) for step in ready.plan.schedule.steps):
        raise Unsupported("a plan that copies values to the host cannot be replayed from a CUDA graph: leave out replay or offload.")


def _twin(sample: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype, device=sample.device)
