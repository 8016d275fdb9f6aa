"""A step captured by Dynamo: what its guards see, what is looked at beside them, and its graph as a model."""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from memfit.capture.guards.frame import GuardedFrame, Locals, capture_step, locals_of
from memfit.capture.guards.graph_model import GraphModel, find_returned_inputs
from memfit.torch_private.dynamo import NotCaptured


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)
        self.gain, self.shift, self.order = 1.0, 0.0, [1, 2]
        self.register_buffer("count", torch.zeros(()))
        self.unused = nn.Linear(2, 2)

    def adjust(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.gain + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.adjust(self.drop(self.norm(self.layer(x))))
        for k in self.order:
            x = x * k
        return x * float(os.environ.get("NET_GAIN", "1"))


def _captured(net: nn.Module) -> tuple[GuardedFrame, Locals]:
    local = locals_of(net, functional.mse_loss, 1, (torch.ones(3, 4), torch.zeros(3, 4)), {})
    frame = capture_step(local)
    assert frame.serves(local)
    return frame, local


CHANGES: dict[str, Callable[[Net], Any]] = {
    "gain": lambda n: setattr(n, "gain", 2.0),
    "shift": lambda n: setattr(n, "shift", -0.0),
    "order": lambda n: n.order.append(3),
    "drop.p": lambda n: setattr(n.drop, "p", 0.2),
    "norm.momentum": lambda n: setattr(n.norm, "momentum", 0.2),
    "hook": lambda n: n.layer.register_forward_hook(lambda *a: None),
    "frozen": lambda n: n.layer.weight.requires_grad_(False),
    "shape": lambda n: setattr(n.layer, "weight", nn.Parameter(torch.ones(4, 4, dtype=torch.float64))),
    "tied": lambda n: setattr(n.norm, "weight", n.layer.bias),
    "patched": lambda n: setattr(n.layer, "forward", lambda x: x),
    "training": lambda n: n.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_not_served(change: str) -> None:
    net = Net()
    frame, local = _captured(net)
    CHANGES[change](net)
    assert not frame.serves(local)
    assert frame.changes(local)


def test_a_new_parameter_of_the_same_kind_is_served() -> None:
    net = Net()
    frame, local = _captured(net)
    net.layer.weight = nn.Parameter(torch.randn(4, 4))
    assert frame.serves(local)


def test_what_dynamo_does_not_guard_is_looked_at_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    frame, local = _captured(Net())
    with monkeypatch.context() as patch:
        patch.setattr(Net, "adjust", lambda self, x: x)
        assert frame.changes(local) == ["functions of class Net"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tanh", torch.relu)
        assert not frame.serves(local)
    with monkeypatch.context() as patch:
        patch.setenv("NET_GAIN", "3")
        assert frame.changes(local) == ["environment variable NET_GAIN"]
    handle = torch_module.register_module_forward_hook(lambda *a: None)
    assert not frame.serves(local)
    handle.remove()
    torch.set_default_dtype(torch.float64)
    try:
        assert not frame.serves(local)
    finally:
        torch.set_default_dtype(torch.float32)
    assert frame.serves(local)


def test_capturing_runs_nothing_of_the_users() -> None:
    net = Net()
    python, numbers = random.getstate(), torch.get_rng_state()
    _captured(net)
    assert net.count == 0
    assert net.norm.num_batches_tracked == 0
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), numbers)


def test_what_dynamo_refuses_says_why_in_a_line() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(NotCaptured) as refused:
        capture_step(locals_of(Branches(), None, 0, (torch.ones(2),), {}))
    assert "\n" not in str(refused.value)


def _in_place(body: nn.Module) -> torch.fx.GraphModule:
    """Its graph, with every + in place: as Dynamo writes `count += 1`."""
    graph = torch.fx.symbolic_trace(body)
    for node in graph.graph.nodes:
        node.target = operator.iadd if node.target is operator.add else node.target
    graph.recompile()
    return graph


def test_a_graph_is_a_model_with_all_parameters_under_their_own_names() -> None:
    class Body(nn.Module):
        def forward(self, weight: torch.Tensor, x: torch.Tensor, count: torch.Tensor) -> Any:
            return x @ weight, count + 1

    net = Net()
    graph = GraphModel(_in_place(Body()), ["layer.weight", 0, "count"], net)
    assert dict(graph.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert dict(graph.named_buffers()).keys() == dict(net.named_buffers()).keys()
    x = torch.ones(2, 4)
    (made,) = graph(x)
    assert net.count == 1
    assert torch.equal(made, x @ net.layer.weight)
    assert graph.all_outputs([made], [net.layer.weight, x, net.count])[1] is net.count
    net.layer.weight = nn.Parameter(torch.ones(4, 4))
    graph.take([net.layer.weight, x, net.count], net)
    assert dict(graph.named_parameters())["layer.weight"] is net.layer.weight


def test_inputs_that_a_graph_gives_back_are_found() -> None:
    class Gives(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return a + 1, b.mul_(2).add_(1), torch.add(a, b), torch.add(a, 1, out=b)

    graph = _in_place(Gives())
    assert find_returned_inputs(graph) == {0: 0, 1: 1, 3: 1}
