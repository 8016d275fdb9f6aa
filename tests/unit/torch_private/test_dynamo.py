"""Frames captured by Dynamo, and what is said where it gives up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memfit.backend
from memfit.torch_private.dynamo import NotCaptured, capture_frame, on_skipped_loop


def double(x: Any) -> Any:
    return {"twice": x * 2}


def test_a_frame_is_graph_guards_and_bytecode() -> None:
    x = torch.ones(3)
    frame = capture_frame(double, {"x": x})  # type: ignore[arg-type]
    assert frame.sources == ("L['x']",)
    assert frame.effects == ()
    assert torch.equal(frame.bind(frame.graph)(x)["twice"], x * 2)
    assert frame.serves({"x": torch.zeros(3)})
    assert not frame.serves({"x": torch.zeros(4)})
    assert "size mismatch" in frame.changes({"x": torch.zeros(4)})[0]


def test_a_frame_that_computes_nothing_is_not_captured() -> None:
    with pytest.raises(NotCaptured, match="nothing is computed"):
        capture_frame(double, {"x": 1})  # type: ignore[arg-type]


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_a_graph_break_inside_a_loop_is_said_of_memfits_backend_alone() -> None:
    memfit.backend.register_backend()
    torch._dynamo.reset()  # forgets those who listen, too
    on_skipped_loop(memfit.backend.memfit_backend, memfit.backend.warn_of_loop)
    with pytest.warns(UserWarning, match=r"plans nothing of forward .*graph break inside a loop"):
        torch.compile(Breaks(), backend="memfit", options={"budget": "1KiB"})(torch.ones(2, 4))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(Breaks(), backend="eager")(torch.ones(2, 4))
