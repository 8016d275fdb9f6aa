"""A piece of a captured step as one callable: its ops as an fx graph, compiled when it first runs.

    fine ops   sub mul add relu   ->   Region(x, mean, var, weight, bias) -> (y,)

Views are made again inside, so only whole storages cross its border. Equal pieces of a network have equal digests and share
one Region, hence one compilation and one measurement.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.core.errors import Unsupported
from memfit.kernels.compiler import Compiles, Run
from memfit.kernels.implementation import Implementation, Work
from memfit.kernels.layouts import lay_out, lies_in
from memfit.passes.regions.compiler import Compiler
from memfit.torch_private.tensors import storage_key
from memfit.torch_private.trees import map_leaves

Source = tuple[torch.fx.GraphModule, list[torch.Tensor]]
Mend = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What must run to make `outputs` from `inputs`: ops of the captured step in their order, views included.

    `over` holds (output, input) pairs: the output is written over the input.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    over: tuple[tuple[int, int], ...] = ()


class Piece:
    """Ops as an fx graph, compiled when it is first asked for: what is given to a compiler, and what came back.

    Equal pieces are compiled once in a process. `source` gives the graph and samples of its inputs; it may go once it has been used.
    """

    def __init__(self, digest: str, num_ops: int, compiler: Compiles, source: Callable[[], Source]) -> None:
        self.digest, self.num_ops = digest, num_ops
        self._compiler = compiler
        self._source: Callable[[], Source] | None = source
        self._run: Run | None = None

    @property
    def is_compiled(self) -> bool:
        return self._run is not None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (self,)

    def compile(self) -> Run:
        if self._run is None:
            key = (self.digest, repr(self._compiler))
            if key not in _COMPILED:
                _COMPILED[key] = self._compiler.compile(*self.source())
            self._run = _COMPILED[key]
            self._source = None  # the traced step may go now
        return self._run

    def source(self) -> Source:
        """What is given to the compiler, until it has been."""
        assert self._source is not None
        return self._source()


class Region(Piece, Implementation):
    """Called with a slice's inputs, gives its outputs. Compiles at the first call."""

    def __init__(self, captured: Captured, part: Slice, digest: str, compiler: Compiler) -> None:
        super().__init__(digest, len(part.ops), compiler, lambda: _source_of(captured, part))
        self._trusted = False
        overwriting = {new for new, _ in part.over}
        self._wanted = tuple(_Form.of(captured.samples[t]) for t in part.outputs if t not in overwriting)
        self._over = tuple(sorted((part.outputs.index(new), part.inputs.index(old)) for new, old in part.over))

    @property
    def name(self) -> str:
        return f"region_{self.digest}"

    def work(self, made: Any, *inputs: torch.Tensor) -> Work:
        return Work.over(inputs, made)

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        run = self._run or self.compile()
        made = run(list(inputs))
        if not self._trusted:
            mend = _mend(inputs, made, self._wanted, self.name)
            if mend is not None:
                self._run = lambda given: mend(run(given))
                made = mend(made)  # not run again: it may have written over its inputs
            self._trusted = True
        return self._with_overwritten(made, inputs) if self._over else made

    def _with_overwritten(self, made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        every = list(made)
        for output, given in self._over:
            every.insert(output, inputs[given])
        return every


def _source_of(captured: Captured, part: Slice) -> Source:
    samples = [captured.samples[t] for t in part.inputs]
    return module_of(captured, part), [s for s in samples if s is not None]


_COMPILED: dict[tuple[str, str], Run] = {}  # of this process, over all steps


@dataclass(frozen=True, slots=True)
class _Form:
    """What a result is by the trace."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, sample: torch.Tensor | None) -> _Form:
        assert sample is not None
        return cls(sample.dtype, sample.shape, sample.stride())


def _mend(inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor], wanted: Sequence[_Form], name: str) -> Mend | None:
    """What makes of a compiler's results those that were traced; None where they are. What cannot be mended is refused.

    A sum may have lost its dimensions of one; a result may lie otherwise than what reads it was compiled for; and two that a compiler finds
    equal may share memory, which a plan frees one by one.
    """
    if len(made) != len(wanted):
        raise Unsupported(f'a compiler gave {len(made)} results of {name}, {len(wanted)} were traced: use engine="eager".')
    for k, (t, form) in enumerate(zip(made, wanted, strict=True)):
        if t.dtype != form.dtype or [n for n in t.shape if n != 1] != [n for n in form.shape if n != 1]:
            given, traced = f"{t.dtype} {tuple(t.shape)}", f"{form.dtype} {tuple(form.shape)}"
            raise Unsupported(f'a compiler gave {given} for result {k} of {name}, traced as {traced}: use engine="eager".')
    steps: list[Mend] = []
    if any(t.shape != form.shape for t, form in zip(made, wanted, strict=True)):
        steps.append(lambda results: [t.reshape(form.shape) for t, form in zip(results, wanted, strict=True)])
        made = steps[-1](made)
    if _shares_memory(inputs, made):
        steps.append(lambda results: [t.clone() for t in results])
        made = steps[-1](made)
    if not all(lies_in(t, form.strides) for t, form in zip(made, wanted, strict=True)):
        steps.append(lambda results: [lay_out(t, form.strides) for t, form in zip(results, wanted, strict=True)])
    return None if not steps else lambda results: reduce(lambda found, step: step(found), steps, results)


def _shares_memory(inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Whether an output lies in an input or in another output."""
    seen = [storage_key(t) for t in made]
    return len(set(seen)) < len(seen) or not {storage_key(t) for t in inputs}.isdisjoint(seen)


def module_of(captured: Captured, part: Slice) -> torch.fx.GraphModule:
    """The slice as an fx graph: inputs in order, every op once, outputs that are not written over an input as a tuple."""
    graph = torch.fx.Graph()
    node_of: dict[int, torch.fx.Node] = {}
    for position, tensor in enumerate(part.inputs):
        node_of[tensor] = graph.placeholder(f"x{position}")
        node_of[tensor].meta["val"] = captured.samples[tensor]
    for op in part.ops:
        call = captured.calls[op]
        args, kwargs = map_leaves(lambda v: node_of[v.tensor] if isinstance(v, Ref) else v, (call.args, dict(call.kwargs)))
        assert call.target is not None
        node = graph.call_function(call.target, args, kwargs)
        if call.unpack:
            node.meta["val"] = tuple(None if t is None else captured.samples[t] for t in call.outputs)
            _unpack(graph, node, captured, call, node_of)
        else:
            (made,) = call.outputs
            assert made is not None
            node.meta["val"] = captured.samples[made]
            node_of.setdefault(made, node)
    for new, old in part.over:
        graph.call_function(torch.ops.aten.copy_.default, (node_of[old], node_of[new])).meta["val"] = captured.samples[old]
    overwriting = {new for new, _ in part.over}
    graph.output(tuple(node_of[t] for t in part.outputs if t not in overwriting))
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _unpack(graph: torch.fx.Graph, node: torch.fx.Node, captured: Captured, call: OpCall, node_of: dict[int, torch.fx.Node]) -> None:
    for k, tensor in enumerate(call.outputs):
        if tensor is not None and tensor not in node_of:
            item = graph.call_function(operator.getitem, (node, k))
            item.meta["val"] = captured.samples[tensor]
            node_of[tensor] = item


def digest_of(captured: Captured, part: Slice) -> str:
    """Equal for slices that do the same to inputs of the same shapes, wherever in the network they lie."""
    number: dict[int, int] = {}

    def local(value: Any) -> Any:
        return ("%", number[value.tensor]) if isinstance(value, Ref) else repr(value)

    text: list[Any] = []
    for tensor in part.inputs:
        sample = captured.samples[tensor]
        assert sample is not None
        number[tensor] = len(number)
        text.append((str(sample.dtype), tuple(sample.shape), sample.stride(), str(sample.device)))
    for op in part.ops:
        call = captured.calls[op]
        text.append((str(call.target), str(map_leaves(local, (call.args, dict(call.kwargs))))))
        for made in call.outputs:
            if made is not None:
                number.setdefault(made, len(number))
    text.append([number[t] for t in part.outputs])
    if part.over:
        text.append([(number[new], number[old]) for new, old in part.over])
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]
