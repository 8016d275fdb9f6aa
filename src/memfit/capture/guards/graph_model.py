"""A captured graph as a model: parameters and buffers under the names they have in the user's model, all other tensors as inputs.

    graph input i  <──  feeds[i]:  the name of a parameter or buffer, the position of an input, or one size of an input
    graph output k ──>  kept, or the input that it is, changed in place (`count += 1`): the caller has that one already

Where in the flow: a frame's graph becomes one, and is traced and planned like any model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.captured import find_beside_the_loss
from memfit.capture.trace.provenance import place_of, placed_at
from memfit.torch_private.checkpoints import is_tagged
from memfit.torch_private.fake import fake_mode
from memfit.torch_private.symbolic import Numbers, Varying, formula_of

_IN_PLACE = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)


@dataclass(frozen=True, slots=True)
class Size:
    """A number that a graph over open sizes takes: dimension `dim` of input `position`."""

    position: int
    dim: int


Feed = str | int | Size


class GraphModel(nn.Module):
    """`graph` over the parameters and buffers of `model`. All of them are held, used or not: the budget covers them.

    `left_out` are outputs that are not produced; `varying` are the sizes of inputs that the graph leaves open.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        feeds: Sequence[Feed],
        model: nn.Module,
        left_out: frozenset[int] = frozenset(),
        varying: Varying | None = None,
    ) -> None:
        super().__init__()
        self._plain = (graph,)  # in a tuple: not registered as a submodule
        self.feeds, self.varying = tuple(feeds), dict(varying or {})
        self.same = find_returned_inputs(graph)
        self.left_out = left_out
        self.kept = tuple(k for k in range(_num_outputs(graph)) if k not in self.same and k not in left_out)
        self.hold(model)
        self._find_used()

    def hold(self, model: nn.Module) -> None:
        """Take the model's parameters and buffers as they are now."""
        self._parameters.clear()
        self._buffers.clear()
        self._parameters.update(model.named_parameters())
        self._buffers.update(model.named_buffers())
        self.tensors = (tuple(self.parameters()), tuple(self.buffers()))

    def take(self, values: Sequence[torch.Tensor], model: nn.Module) -> None:
        """The graph's inputs of this call: where one of the model's tensors was replaced, all are taken anew."""
        if any(held is not value for held, value in zip(self._used, values, strict=True) if held is not None):
            self.hold(model)
            self._find_used()

    def _find_used(self) -> None:
        """Per input of the graph the model's tensor that it is, None for others: those are the caller's, and not kept."""
        state: dict[str, Any] = {**self._parameters, **self._buffers}
        self._used = tuple(state[f] if isinstance(f, str) else None for f in self.feeds)

    @property
    def num_nodes(self) -> int:
        return len(self._plain[0].graph.nodes)

    def all_outputs(
        self, made: Sequence[Any], values: Sequence[torch.Tensor], stand_in: Callable[[int], torch.Tensor] | None = None
    ) -> tuple[Any, ...]:
        """Outputs that are kept, inputs that the graph gives back, and what stands in for those that are left out."""
        found: dict[int, Any] = {**dict(zip(self.kept, made, strict=True)), **{k: values[i] for k, i in self.same.items()}}
        if stand_in is not None:
            found |= {k: stand_in(k) for k in self.left_out}
        return tuple(found[k] for k in range(len(found)))

    def call_with(self, state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs that are kept, from these parameters, buffers and inputs; each node is said to come from where Dynamo saw it."""
        made = _Places(self._plain[0]).run(*(_find_value(f, state, inputs) for f in self.feeds))
        return tuple(made[k] for k in self.kept)

    @property
    def num_checkpoints(self) -> int:
        """How often the user's code has a part computed again by `torch.utils.checkpoint`."""
        graphs = [m for m in self._plain[0].modules() if isinstance(m, torch.fx.GraphModule)]
        return sum(is_tagged(node) for graph in graphs for node in graph.graph.nodes)

    def samples_for(self, values: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Fake tensors like the outputs that are left out, for these values of the graph's inputs."""
        (last,) = self._plain[0].graph.find_nodes(op="output")
        found = {k: last.args[0][k].meta["example_value"] for k in self.left_out}
        if not self.varying:
            return found
        inputs = [node.meta["example_value"] for node in self._plain[0].graph.find_nodes(op="placeholder")]
        pairs = [(i, v) for i, v in zip(inputs, values, strict=True) if isinstance(i, torch.SymInt)]
        numbers = Numbers.of_symbols([i for i, _ in pairs], [v for _, v in pairs])
        return {k: _sized(sample, numbers) for k, sample in found.items()}

    def run(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs that are kept, computed as they come, from values of all the graph's inputs."""
        made = self._plain[0](*values)
        return tuple(made[k] for k in self.kept)

    def run_whole(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All outputs, computed as they come."""
        made: tuple[torch.Tensor, ...] = self._plain[0](*values)
        return made

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state: dict[str, Any] = {**self._parameters, **self._buffers}
        return self.run([_find_value(f, state, inputs) for f in self.feeds])


def _find_value(feed: Feed, state: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> Any:
    if isinstance(feed, Size):
        return inputs[feed.position].shape[feed.dim]
    return state[feed] if isinstance(feed, str) else inputs[feed]


def _sized(sample: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """A fake tensor like one with open sizes."""
    shape, strides = (numbers.of_all([formula_of(n) for n in found]) for found in (sample.shape, sample.stride()))
    with fake_mode():
        return torch.empty_strided(shape, strides, dtype=sample.dtype, device=sample.device)


def find_returned_inputs(graph: torch.fx.GraphModule) -> dict[int, int]:
    """Outputs of a graph that are inputs of it, changed in place: position of the output -> of the input."""
    nodes = list(graph.graph.nodes)
    inputs = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    found = {}
    for k, node in enumerate(nodes[-1].args[0]):
        while isinstance(node, torch.fx.Node) and node not in inputs:
            node = _find_overwritten(node)
        if node is not None and node in inputs:
            found[k] = inputs[node]
    return found


def find_outputs_beside_the_loss(graph: torch.fx.GraphModule) -> frozenset[int]:
    """Outputs that have a gradient and are not the one number that is the loss; none where there is no such number, or more."""
    (last,) = graph.graph.find_nodes(op="output")
    samples = {k: node.meta.get("example_value") for k, node in enumerate(last.args[0]) if isinstance(node, torch.fx.Node)}
    returned = find_returned_inputs(graph)
    graded = {k: t.dim() for k, t in samples.items() if isinstance(t, torch.Tensor) and t.requires_grad and k not in returned}
    return find_beside_the_loss(graded)


def _find_overwritten(node: torch.fx.Node) -> Any:
    """The value whose memory a node gives back as its own result; None for one that makes a new value."""
    if "out" in node.kwargs:
        return node.kwargs["out"]
    is_method = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    if is_method or (node.op == "call_function" and node.target in _IN_PLACE):
        return node.args[0]
    return None


def _num_outputs(graph: torch.fx.GraphModule) -> int:
    (last,) = graph.graph.find_nodes(op="output")
    return len(last.args[0])


class _Places(torch.fx.Interpreter):
    """Runs a graph, and says of each op which module and line of the user's it comes from. Checkpoints in it run as what is inside them."""

    def run_node(self, n: torch.fx.Node) -> Any:
        with placed_at(place_of(n)):
            if is_tagged(n):
                (inside, *inputs), _ = self.fetch_args_kwargs_from_env(n)
                return _Places(inside).run(*inputs)
            return super().run_node(n)
