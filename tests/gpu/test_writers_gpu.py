"""Writers on a machine with a GPU: forked before anybody looked at it, they write for it and what they wrote is found."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from memfit.capture.inputs import Call
from memfit.compilers.inductor import code_writers as writers
from memfit.compilers.inductor import writer_pool as pools
from memfit.compilers.inductor.code_writers import yield_written
from memfit.compilers.inductor.compiler import Inductor
from memfit.passes.regions.regions import regions_of
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def four_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[writers._Writers]:
    monkeypatch.setattr(pools, "num_writers", lambda: 4)
    monkeypatch.setattr(writers, "num_writers", lambda: 4)
    monkeypatch.setattr(writers, "_WRITERS", writers._Writers())
    yield writers._WRITERS
    writers.end_writers()


def test_writers_that_were_woken_early_write_for_the_gpu(four_writers: writers._Writers) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(
        device
    )
    with fresh_cache():
        writers.wake_writers(device)
        step = next(
            Forms(Task(model=model, engine="inductor"), Call.flatten((torch.randn(4, 3, 16, 16, device=device),), {})).usual()
        ).captured
        regions = regions_of(step)
        done, late = wait(four_writers._waking, timeout=120)
        assert not late
        assert [str(job.exception()) for job in done if job.exception() is not None] == []
        before = counters["inductor"]["fxgraph_cache_hit"]
        with Inductor().together():
            for region in yield_written(regions):
                region.compile()
        assert counters["inductor"]["fxgraph_cache_hit"] - before >= 4  # this process writes the small ones meanwhile
    assert all(region.is_compiled for region in regions)
