"""Code written by other processes: a graph survives the journey, what was written is found, and no failure loses a region."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from memfit.capture.inputs import Call
from memfit.capture.region import Region
from memfit.capture.regions import regions_of
from memfit.execute import inductor, writers
from memfit.execute.inductor import Inductor, Settings, writer_pool
from memfit.execute.writers import Text, as_written, write
from memfit.task import Task

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor on the CPU needs a C++ compiler"
)


def num_found_on_disk() -> int:
    return int(counters["inductor"]["fxgraph_cache_hit"])


@pytest.fixture(scope="module")
def regions() -> list[Region]:
    """Constants, views, several outputs, random numbers, a loss."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(3 + k, 4 + k, 3, padding=1), nn.BatchNorm2d(4 + k), nn.ReLU(), nn.Dropout(0.1)) for k in range(3)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    task = Task(model=model, loss_fn=nn.functional.cross_entropy, num_targets=1, engine="inductor")
    (first, *_) = task.offers(Call.flatten((torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))), {}))
    return regions_of(first)


def test_a_graph_that_is_sent_is_the_same_code(regions: list[Region]) -> None:
    assert len(regions) >= 8
    for region in regions:
        module, samples = region.source()
        text = Text.of(module, samples)
        assert text is not None
        again, fakes = text.read()
        assert again.code == module.code
        assert [(f.shape, f.stride(), f.dtype) for f in fakes] == [(s.shape, s.stride(), s.dtype) for s in samples]


def test_a_graph_that_calls_python_is_not_sent() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    graph = torch.fx.Graph()
    graph.output((graph.call_function(own, (graph.placeholder("x"),)),))
    assert Text.of(torch.fx.GraphModule(nn.Module(), graph), [torch.zeros(2)]) is None
    graph = torch.fx.Graph()
    graph.output((graph.call_function(operator.getitem, (graph.placeholder("x"), 0)),))
    assert Text.of(torch.fx.GraphModule(nn.Module(), graph), [torch.zeros(2)]) is not None


@needs_compiler
def test_what_was_written_is_found_on_disk(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncCompile, "triton", AsyncCompile.triton)  # `write` takes it out of its process, which is this one here
    module, samples = max(regions, key=lambda r: r.num_ops).source()
    with fresh_cache():
        text = Text.of(module, samples)
        assert text is not None
        write(text, Settings.here())
        before = num_found_on_disk()
        Inductor().compile(module, samples)
        assert num_found_on_disk() == before + 1


def test_settings_travel() -> None:
    before = Settings.here()
    try:
        with config.patch(shape_padding=not config.shape_padding):
            torch.set_default_dtype(torch.float64)
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            changed, padding = Settings.here(), config.shape_padding
        before.apply()
        assert torch.get_default_dtype() == torch.float32
        changed.apply()
        assert torch.get_default_dtype() == torch.float64
        assert config.shape_padding == padding
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        before.apply()
    assert Settings.here() == before


class Pool:
    """In place of the processes: does at once what it is given, or fails, or never ends."""

    def __init__(self, how: str) -> None:
        self.how, self.written = how, list[Text]()

    def submit(self, function: Any, *given: Any) -> Future[None]:
        if self.how == "closed":
            raise RuntimeError("Attempting to use a closed pool")
        job: Future[None] = Future()
        if self.how == "fails" and function is write:
            job.set_exception(RuntimeError("killed"))
        elif self.how != "hangs" or function is not write:
            job.set_result(None)
        if function is write:
            self.written.append(given[0])
        return job


def compiled_with(pool: Pool, regions: list[Region], seconds_each: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests in the order of compiling, by a clock that only moves when something is compiled."""
    clock = [0.0]
    monkeypatch.setattr(writers, "num_writers", lambda: 2)
    monkeypatch.setattr(writers, "writer_pool", lambda: pool)
    monkeypatch.setattr(writers.time, "perf_counter", lambda: clock[0])
    order = []
    for region in as_written(regions):
        clock[0] += seconds_each
        order.append(region.digest)
    return order


@pytest.mark.parametrize("how", ["works", "fails", "hangs", "closed"])
def test_every_region_comes_once_whatever_the_writers_do(how: str, regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(how)
    order = compiled_with(pool, regions, 100.0, monkeypatch)
    assert sorted(order) == sorted(r.digest for r in regions)
    assert bool(pool.written) == (how != "closed")


def test_writers_take_the_largest_and_this_process_the_smallest(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("hangs")
    order = compiled_with(pool, regions, 100.0, monkeypatch)
    assert len(pool.written) == 4  # two for each, since none ends
    sizes = [r.num_ops for r in sorted(regions, key=lambda r: order.index(r.digest))]
    assert sizes[:-4] == sorted(sizes[:-4])
    assert min(sizes[-4:]) >= max(sizes[:-4])


def test_for_what_is_soon_done_no_process_is_started(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("works")
    order = compiled_with(pool, regions, 0.2, monkeypatch)
    assert sorted(order) == sorted(r.digest for r in regions)
    assert not pool.written


@pytest.fixture
def two_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(inductor, "num_writers", lambda: 2)
    writer_pool.cache_clear()
    pool = writer_pool()
    yield pool
    pool.shutdown()
    writer_pool.cache_clear()


@needs_compiler
def test_other_processes_write_for_this_one(regions: list[Region], two_writers: Any) -> None:
    module, samples = min(regions, key=lambda r: abs(r.num_ops - 6)).source()
    text = Text.of(module, samples)
    assert text is not None
    with fresh_cache():
        two_writers.submit(write, text, Settings.here()).result(timeout=300)
        before = num_found_on_disk()
        Inductor().compile(module, samples)
        assert num_found_on_disk() == before + 1
