"""Copies on the host: what comes back is what went, with all its views, outside torch's allocator."""

from __future__ import annotations

import torch
from tests.training import CPU

from memfit.runtime.host_copies import HostCopies
from memfit.torch_private.allocations import peaks_of


def test_a_storage_comes_back_with_every_tensor_that_views_it() -> None:
    whole = torch.arange(24, dtype=torch.float32)
    turned, tail = whole.view(4, 6).t(), whole[10:]
    expected = [t.clone() for t in (whole, turned, tail)]
    host = HostCopies(CPU)
    host.send(3, whole, turned, tail)
    host.wait_sent(3)
    whole.zero_()
    back = host.fetch(3)
    host.wait_arrived(3)
    for found, right, like in zip(back, expected, (whole, turned, tail), strict=True):
        assert torch.equal(found, right)
        assert found.stride() == like.stride()
    assert len({t.untyped_storage().data_ptr() for t in back}) == 1


def test_one_tensor_comes_back_alone_and_as_often_as_wanted() -> None:
    host = HostCopies(CPU)
    host.send(0, torch.ones(5, dtype=torch.bfloat16))
    first, second = host.fetch(0), host.fetch(0)
    assert first.dtype is torch.bfloat16
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    host.drop(0)


def test_the_copy_is_not_in_torchs_allocator() -> None:
    host, x = HostCopies(CPU), torch.ones(2**18)
    left, peak = peaks_of(lambda: host.send(0, x), CPU)
    assert max(left, peak) < 2**10
    left, _ = peaks_of(lambda: host.fetch(0), CPU)
    assert left == 2**20
