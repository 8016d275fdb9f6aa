"""Random states: put back, taken forward again, and not asked for while a CUDA graph is captured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.training import fit_tight, same
from torch import nn
from torch.nn import functional

from memfit.core.errors import Unsupported
from memfit.runtime.rng import RandomStates, get_state, set_state

CPU = torch.device("cpu")


def test_a_replay_draws_the_same_numbers_and_then_goes_on() -> None:
    torch.manual_seed(0)
    rng = RandomStates(CPU)
    draw = torch.ops.aten.rand.default
    first, second = rng.draw(3, draw, [4]), torch.rand(4)
    again = rng.redraw(3, draw, [4])
    third = torch.rand(4)
    assert torch.equal(first, again)
    assert not torch.equal(second, third)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(12)[8:], third)


def test_while_a_graph_is_captured_there_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    state = get_state(torch.device("cuda", 0))
    with pytest.raises(Unsupported, match="CUDA graph"):
        set_state(torch.device("cuda", 0), state)
    assert get_state(CPU)


@pytest.mark.parametrize("op", ["native_dropout", "rand_like", "bernoulli.p", "rand", "randn", "randint.low", "randperm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_own_generator_draws_what_the_default_one_would(op: str, dtype: torch.dtype) -> None:
    name, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.aten, name), overload or "default")
    x = torch.randn(5, 7).to(dtype).t()
    arguments: dict[str, tuple[Any, ...]] = {"native_dropout": (x, 0.3, True), "rand_like": (x,), "bernoulli.p": (x, 0.4)}
    given = arguments.get(op, {"rand": ([9],), "randn": ([9],), "randint.low": (2, 9, [9]), "randperm": (9,)}.get(op, ()))
    torch.manual_seed(2)
    expected = target(*given)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    rng = RandomStates(CPU)
    assert same(rng.draw(0, target, *given), expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.rand(3)
    between = torch.get_rng_state()
    assert same(rng.redraw(0, target, *given), expected)
    assert torch.equal(torch.get_rng_state(), between)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_replay_that_fails_gives_the_numbers_back(error: type[BaseException]) -> None:
    """Of an op that knows the default generator only."""
    fails = False

    def draws() -> torch.Tensor:
        drawn = torch.rand(4)
        if fails:
            raise error
        return drawn

    rng = RandomStates(CPU)
    first = rng.draw(0, draws)
    torch.rand(2)
    before = torch.get_rng_state()
    assert torch.equal(rng.redraw(0, draws), first)
    fails = True
    with pytest.raises(error):
        rng.redraw(0, draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_that_draw_meanwhile_leave_recomputed_dropout_alone() -> None:
    """Two fitted models train and a third thread draws numbers all the time: the mask of backward is the one of forward, always."""
    wrong: list[str] = []
    done: list[Any] = []
    stop = threading.Event()

    class Masked(nn.Module):
        """Its gradient is zero where its output is: what backward drew shows."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4096))

        def forward(self) -> torch.Tensor:
            h = self.weight
            for _ in range(8):
                h = functional.dropout(torch.sin(h), 0.2)
            return h

    models: list[Any] = [fit_tight(Masked(), (), check=False) for _ in range(2)]
    assert all("redraw" in m._memfit.latest.ready.program.source for m in models)

    def train(fitted: Any) -> None:
        for step in range(60):
            out = fitted()
            out.sum().backward()
            if not torch.equal(fitted.weight.grad != 0, out != 0):
                wrong.append(f"step {step}")
            fitted.weight.grad = None
        done.append(fitted)

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1000)

    threads = [threading.Thread(target=train, args=(m,)) for m in models]
    other = threading.Thread(target=draw)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    other.join()
    assert not wrong
    assert len(done) == 2
