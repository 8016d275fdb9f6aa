"""Random states: put back, taken forward again, and not asked for while a CUDA graph is captured."""

from __future__ import annotations

import pytest
import torch

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
