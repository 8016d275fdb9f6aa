"""Ten thousand steps (`benchmarks/guards.py soak`): memory stays flat, every gradient that is looked at is the plain model's."""

from __future__ import annotations

import pytest
import torch
from benchmarks.parts.guards.soak import Soak

MIB_OF_GROWTH = 16  # of the process, beyond what it holds once every dropout rate was planned; Python's own heap breathes by a few
PLANNED = 5  # parts: the rate changes at the end of each of the first four, and every change is planned once


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_ten_thousand_steps(engine: str) -> None:
    torch.set_num_threads(1)
    soak = Soak("cpu", engine)
    parts = [soak.part(first, 1000) for first in range(0, 10_000, 1000)]
    assert sum(part["compared"] for part in parts) >= 100
    assert sum(part["interrupted"] for part in parts) >= 100
    assert not any(part["different"] for part in parts)
    assert parts[-1]["memory MiB"] - parts[PLANNED - 1]["memory MiB"] <= MIB_OF_GROWTH
