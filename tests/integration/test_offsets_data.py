"""The public packing instances, where they are: minimalloc's at their capacity, idealloc's within a percent of the bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.core.outcome import Status
from memfit.offsets import pack, read_buffers

DATA = Path(__file__).parents[2] / "../shared/data/offsets"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the public instances are not here")
CAPACITY = 1_048_576


@pytest.mark.parametrize("name", "ABCDEFGH")
def test_minimalloc_instances_are_packed_at_their_capacity(name: str) -> None:
    packing = pack(read_buffers(DATA / f"minimalloc_{name}.csv"), CAPACITY, 120.0)
    assert packing.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert packing.height <= CAPACITY


@pytest.mark.parametrize("name", ["G_1", "resnet50", pytest.param("S_1", marks=pytest.mark.slow)])
def test_idealloc_instances_are_within_a_percent_of_the_bound(name: str) -> None:
    packing = pack(read_buffers(DATA / f"idealloc_{name}.csv"), None, 10.0)
    assert packing.height <= 1.01 * packing.lower_bound
