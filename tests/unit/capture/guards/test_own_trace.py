"""What stands beside memfit's own trace: the fingerprint, Python state put back, draws and writes refused, a limit to changes."""

from __future__ import annotations

import copyreg
import random
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.capture.guards.fingerprint import look
from memfit.capture.guards.turns import Turns, name_of
from memfit.capture.guards.watch import Watch
from memfit.capture.guards.written import Kept
from memfit.core.errors import Unsupported

SCALE = 1.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.1)
        self.order, self.table, self.space, self.deep = [1, 2], {"a": 1.0}, types.SimpleNamespace(gain=1.0), {"a": [{"b": 1}]}
        self.zero, self.act = 0.0, functional.relu
        self.cache: Any = None

    def adjust(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adjust(self.drop(self.act(self.layer(x))))


def _set_global(net: Net) -> None:
    global SCALE
    SCALE += 1.0


CHANGES: dict[str, Callable[[Net], Any]] = {
    "number of a child": lambda n: setattr(n.drop, "p", 0.2),
    "list": lambda n: n.order.append(1),
    "dictionary": lambda n: n.table.update(a=2.0),
    "namespace": lambda n: setattr(n.space, "gain", 2.0),
    "nested": lambda n: n.deep["a"][0].update(b=2),
    "sign of a zero": lambda n: setattr(n, "zero", -0.0),
    "function": lambda n: setattr(n, "act", torch.tanh),
    "hook": lambda n: n.layer.register_forward_hook(lambda *a: None),
    "child": lambda n: setattr(n, "layer", nn.Linear(3, 3, bias=False)),
    "shape": lambda n: setattr(n.layer, "weight", nn.Parameter(torch.ones(4, 3))),
    "tied": lambda n: n.layer.register_parameter("bias", nn.Parameter(torch.ones(3)).requires_grad_(False)),
    "forward on the instance": lambda n: setattr(n.layer, "forward", lambda x: x),
    "class": lambda n: setattr(n.layer, "__class__", type("Other", (nn.Linear,), {})),
    "global of a helper": _set_global,
    "training": lambda n: n.drop.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees_a_change(change: str) -> None:
    net = Net()
    before = look(net, None, ()).found
    assert look(net, None, ()).found == before
    CHANGES[change](net)
    assert look(net, None, ()).found != before


def test_the_fingerprint_sees_a_method_patched_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    before = look(net, None, ()).found
    monkeypatch.setattr(Net, "adjust", lambda self, x: x)
    assert look(net, None, ()).found != before


def test_the_fingerprint_sees_the_loss_and_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = [1.0]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return x * weight[0]

    net = Net()
    before = look(net, loss, (1.0,)).found
    assert look(net, loss, (1.0,)).found == before
    assert look(net, loss, (2.0,)).found != before
    weight[0] = 2.0
    changed = look(net, loss, (1.0,)).found
    assert changed != before
    monkeypatch.setenv("SOMETHING_NEW", "1")
    assert look(net, loss, (1.0,)).found != changed


def test_names_say_where_a_value_was_found() -> None:
    walk = look(Net(), None, (), named=True)
    assert len(walk.names) == len(walk.found)
    assert {"model.drop.p", "model.table.0", "model.layer.weight"} <= set(walk.names)


def test_python_state_is_put_back_and_named() -> None:
    net = Net()
    before = dict(vars(net))
    kept = Kept(net)
    net.order.append(3)
    net.table["b"] = 1.0
    net.cache = torch.ones(1)
    net.new = 1
    net.drop.p = 0.5
    net.space.gain = 3.0
    changed = kept.restore()
    assert (net.order, net.table, net.drop.p, net.space.gain) == ([1, 2], {"a": 1.0}, 0.1, 1.0)
    assert vars(net).keys() == before.keys()
    assert net.cache is None
    assert {"model.cache", "model.new", "model.drop.p", "model.order"} <= set(changed)
    assert Kept(net).restore() == []


@pytest.mark.parametrize(("draw", "name"), [(random.random, "python"), (np.random.rand, "numpy")])
def test_draws_of_forward_are_refused_and_taken_back(draw: Callable[[], float], name: str) -> None:
    watch = Watch(Net(), None)
    random.seed(1), np.random.seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1)
    with pytest.raises(Unsupported, match=f"draws from {name}'s random numbers"), watch.planning():
        draw()
    assert draw() == expected


def test_writes_of_forward_are_refused_by_name_and_taken_back() -> None:
    net = Net()
    with pytest.raises(Unsupported, match=r"writes to model\.cache"), Watch(net, None).planning():
        net.cache = 1
    assert net.cache is None


def test_an_error_inside_is_passed_on_and_the_state_is_put_back_all_the_same() -> None:
    net = Net()
    planning = Watch(net, None).planning()
    planning.__enter__()
    net.cache = 1
    assert not planning.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert net.cache is None


def test_captures_in_a_row_are_limited_and_what_changed_is_named() -> None:
    turns = Turns()
    for _ in range(3 * Turns.most):
        turns.begin([])
        turns.served()
    for _ in range(Turns.most):
        turns.begin(["L['model'].n == 1"])
    with pytest.raises(Unsupported, match=r"8 calls in a row.*model\.p == 0\.5"):
        turns.begin(["L['model'].p == 0.5"], ["L['model'].n"])
    with pytest.raises(Unsupported, match=r"forward changes model\.n and depends on it"):
        turns.begin(["L['model'].n == 9"], ["L['model'].n"])


def test_names_are_the_users() -> None:
    assert name_of("L['model']._modules['fc'].p == 0.5") == "model.fc.p == 0.5"
    assert name_of("L['model'].__dict__['_buffers']['count']") == "model.count"


def test_what_torchs_own_layers_keep_for_themselves_is_put_back_in_silence() -> None:
    cells = nn.LSTM(2, 2)
    kept = Kept(cells)
    before = list(cells._flat_weights)
    cells._flat_weights.append(None)
    assert kept.restore() == []
    assert all(a is b for a, b in zip(cells._flat_weights, before, strict=True))


def test_defaults_of_a_function_deep_down_are_the_same_at_every_look() -> None:
    def scaled(x: torch.Tensor, gain: float = 1.0, *, shift: float = 0.0) -> torch.Tensor:
        return x * gain + shift

    net = Net()
    net.deep = {"a": [{"b": scaled}]}  # type: ignore[dict-item]
    before = look(net, None, ()).found
    assert look(net, None, ()).found == before
    scaled.__defaults__ = (2.0,)
    assert look(net, None, ()).found != before


def test_tables_that_grow_with_every_import_are_not_looked_at() -> None:
    """A model that copies something reaches them; a new plan at the first step after an import was the price."""

    class Copies(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return deepcopy(self.layer)(x)

    class Imported:
        pass

    net = Copies()
    before = look(net, None, ()).found
    copyreg.pickle(Imported, lambda value: (Imported, ()))
    try:
        assert look(net, None, ()).found == before
    finally:
        copyreg.dispatch_table.pop(Imported)
