"""A captured graph as a model: parameters and buffers under the names they have in the user's model, all other tensors as inputs.

    graph input i  <──  feeds[i]:  the name of a parameter or buffer, or the position of an input
    graph output k ──>  kept, or the input that it is, changed in place (`count += 1`): the caller has that one already

Where in the flow: a frame's graph becomes one, and is traced and planned like any model.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.trace.provenance import place_of, placed_at

_IN_PLACE = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)


class GraphModel(nn.Module):
    """`graph` over the parameters and buffers of `model`. All of them are held, used or not: the budget covers them."""

    def __init__(self, graph: torch.fx.GraphModule, feeds: Sequence[str | int], model: nn.Module) -> None:
        super().__init__()
        self._plain = (graph,)  # in a tuple: not registered as a submodule
        self.feeds = tuple(feeds)
        self.same = find_returned_inputs(graph)
        self.kept = tuple(k for k in range(_num_outputs(graph)) if k not in self.same)
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

    def with_inputs(self, made: Sequence[Any], values: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """All outputs of the graph: those that are kept, and the inputs that it gives back."""
        feed = iter(made)
        return tuple(values[self.same[k]] if k in self.same else next(feed) for k in range(len(self.same) + len(self.kept)))

    def call_with(self, state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs that are kept, from these parameters, buffers and inputs; each node is said to come from where Dynamo saw it."""
        made = _Places(self._plain[0]).run(*(state[f] if isinstance(f, str) else inputs[f] for f in self.feeds))
        return tuple(made[k] for k in self.kept)

    def run(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs that are kept, computed as they come, from values of all the graph's inputs."""
        made = self._plain[0](*values)
        return tuple(made[k] for k in self.kept)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state: dict[str, Any] = {**self._parameters, **self._buffers}
        return self.run([state[f] if isinstance(f, str) else inputs[f] for f in self.feeds])


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
    """Runs a graph, and says of each op which module and line of the user's it comes from."""

    def run_node(self, n: torch.fx.Node) -> Any:
        with placed_at(place_of(n)):
            return super().run_node(n)
