"""The allocator's own account of bytes held."""

from __future__ import annotations

import pytest
import torch
from tests.training import CPU

from memfit.torch_private.allocations import CpuMeter, peaks_of


def test_the_meter_counts_what_is_held_and_what_was() -> None:
    def work() -> torch.Tensor:
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        c = torch.empty(250)
        del b
        return c

    assert peaks_of(work, CPU) == (1000, 6000)


def test_the_meter_is_closed_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        peaks_of(lambda: 1 / 0, CPU)
    assert peaks_of(lambda: torch.empty(10), CPU) == (40, 40)
    meter = CpuMeter()
    meter.start()
    assert meter.stop() == (0, 0)
