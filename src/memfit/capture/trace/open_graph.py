"""A step traced with open sizes, as the step of one size after another.

    trace over s ── once ──> a graph over numbers, and where in it numbers go
                    at(call): arithmetic on sizes is done, samples get their shapes  ──> the graph that a trace of this call gives

What is arithmetic on sizes in the trace is run as Python here, so that a number is the one that the plain model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.trace.joint_graph import Joint
from memfit.core.errors import Unsupported
from memfit.torch_private.fake import Mode, fake_mode, make_fake
from memfit.torch_private.symbolic import Numbers, formula_of, is_formula, is_symbolic
from memfit.torch_private.trees import leaves_of

_SIZE, _SLICE = torch.ops.aten.sym_size.int, torch.ops.aten.slice.Tensor
_SLICE_BACKWARD = torch.ops.aten.slice_backward.default
_TO_THE_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Sample:
    """A tensor's description, sizes as formulas."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    storage_bytes: Any

    @classmethod
    def of(cls, value: torch.Tensor) -> _Sample:
        return cls(
            value.dtype,
            value.device,
            tuple(map(formula_of, value.shape)),
            tuple(map(formula_of, value.stride())),
            formula_of(value.storage_offset()),
            formula_of(value.untyped_storage().nbytes()),
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """A node of the trace and its twin among numbers, None for arithmetic on sizes; whether its arguments hold sizes."""

    node: torch.fx.Node
    twin: torch.fx.Node | None
    sized: bool
    value: Any  # the samples of its results


class OpenGraph:
    """`at` changes one graph in place: whoever uses it reads it before the next `at`."""

    def __init__(self, joint: Joint, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors` are those of the call that was traced."""
        if any(map(is_symbolic, joint.output_leaves)):
            raise Unsupported("the step returns a size beside its tensors")
        self._joint = joint
        self._mode = fake_mode(allow_non_fake_inputs=True)
        self._twins: dict[torch.fx.Node, torch.fx.Node] = {}
        self._places: list[_Place] = []
        self._same: list[tuple[_Sample, _Sample]] = []  # before and after what is left out
        self._numbers = self._find_numbers(tensors)
        graph = torch.fx.Graph()
        for node in joint.module.graph.nodes:
            self._copy(graph, node)
        self._module = torch.fx.GraphModule(joint.module, graph)

    def _copy(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if is_symbolic(value):
            self._places.append(_Place(node, None, True, None))
            return
        if self._leave_out(node):
            return
        if any(map(is_symbolic, leaves_of((node.args, node.kwargs)))):
            raise Unsupported(f"{node.target} takes a size that comes from nowhere")
        stand_in: Any = self._twins.get
        twin = graph.node_copy(node, stand_in)
        twin.meta = dict(node.meta)
        self._twins[node] = twin
        sized = any(is_symbolic(n.meta.get("val")) for n in node.all_input_nodes)
        self._places.append(_Place(node, twin, sized, _describe(value)))

    def _leave_out(self, node: torch.fx.Node) -> bool:
        """What takes all of a tensor, or is the gradient of that, is that tensor: where sizes are numbers PyTorch makes no slice."""
        if not _takes_all(node):
            return False
        source: Any = node.args[0]
        given, made = _Sample.of(source.meta["val"]), _Sample.of(node.meta["val"])
        if _lies(given, self._numbers) != _lies(made, self._numbers):
            return False
        self._twins[node] = self._twins[source]
        self._same.append((given, made))
        return True

    @property
    def num_checkpoints(self) -> int:
        return self._joint.num_checkpoints

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the trace holds for a call with these tensors."""
        assert self._joint.sizes is not None
        return self._joint.sizes.at(tensors) is not None

    def at(self, tensors: Sequence[torch.Tensor]) -> Joint:
        """The step of a call with these tensors."""
        numbers = self._find_numbers(tensors)
        found: dict[torch.fx.Node, Any] = {}
        samples: dict[Any, torch.Tensor] = {}

        def fill_in(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(fill_in, value))
            if isinstance(value, _Sample):
                return _make(value, numbers, samples, self._mode)
            return numbers.of(value) if is_formula(value) else value

        for place in self._places:
            if place.twin is None:
                found[place.node] = self._compute(place.node, found)
                continue
            if place.sized:
                place.twin.args = self._fill(place.node.args, found)
                place.twin.kwargs = self._fill(place.node.kwargs, found)
            if place.value is not None:
                place.twin.meta["val"] = fill_in(place.value)
        for given, made in self._same:
            if _lies(given, numbers) != _lies(made, numbers):
                raise Unsupported("a slice of everything has another layout than what it is made of")
        self._check_inputs(tensors)
        return replace(self._joint, module=self._module, sizes=None)

    def _find_numbers(self, tensors: Sequence[torch.Tensor]) -> Numbers:
        assert self._joint.sizes is not None
        numbers = self._joint.sizes.at(tensors)
        if numbers is None:
            raise Unsupported("the step was traced for other sizes")
        return numbers

    def _fill(self, arguments: Any, found: dict[torch.fx.Node, Any]) -> Any:
        return torch.fx.node.map_arg(arguments, lambda n: found[n] if n in found else self._twins[n])

    def _compute(self, node: torch.fx.Node, found: dict[torch.fx.Node, Any]) -> Any:
        """A number that follows from sizes, as Python computes it."""
        if node.op != "call_function":
            raise Unsupported(f"a size comes from {node.op} {node.target}")
        given: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: found[n] if n in found else self._twins[n].meta["val"])
        args, kwargs = given
        target: Any = node.target
        return int(args[0].shape[args[1]]) if target is _SIZE else target(*args, **kwargs)

    def _check_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """The inputs of the graph are as the call's tensors."""
        first = self._joint.num_parameters + self._joint.num_buffers
        inputs = self._module.graph.find_nodes(op="placeholder")[first : first + len(tensors)]
        for node, tensor in zip(inputs, tensors, strict=True):
            sample = node.meta["val"]
            if (sample.shape, sample.stride(), sample.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
                raise Unsupported("the step was traced for tensors of another layout")


def _takes_all(node: torch.fx.Node) -> bool:
    if node.kwargs or node.target not in (_SLICE, _SLICE_BACKWARD):
        return False
    start_end_step = (*node.args[(2 if node.target is _SLICE else 3) :], 1)[:3]
    return start_end_step == (0, _TO_THE_END, 1)


def _describe(value: Any) -> Any:
    """What a node gives: a tensor, several of them, or numbers beside them."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_describe, value))
    return _Sample.of(value) if isinstance(value, torch.Tensor) else formula_of(value)


def _lies(sample: _Sample, numbers: Numbers) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return numbers.of_all(sample.shape), numbers.of_all(sample.strides)


def _make(sample: _Sample, numbers: Numbers, known: dict[Any, torch.Tensor], mode: Mode) -> torch.Tensor:
    """A fake tensor; one for all that are described alike."""
    found = known.get(sample)
    if found is None:
        shape, strides = numbers.of_all(sample.shape), numbers.of_all(sample.strides)
        offset, size = numbers.of(sample.offset), numbers.of(sample.storage_bytes)
        found = known[sample] = make_fake(mode, shape, strides, sample.dtype, sample.device, offset, size)
    return found
