"""Code written by other processes: a graph survives the journey, what was written is found, and no failure loses a region."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from memfit.capture.inputs import Call
from memfit.capture.region import Region
from memfit.capture.regions import regions_of
from memfit.execute import inductor, writers
from memfit.execute.inductor import Inductor, Settings, num_found_on_disk, writer_pool
from memfit.execute.writers import Text, as_written, write
from memfit.task import Task

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor on the CPU needs a C++ compiler"
)


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


class Refusing:
    """A pool whose every job fails."""

    def submit(self, *_: Any) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(RuntimeError("killed"))
        return failed


class Closed:
    def submit(self, *_: Any) -> Future[None]:
        raise RuntimeError("Attempting to use a closed pool")


def as_given(regions: list[Region]) -> list[str]:
    return sorted(r.digest for r in as_written(regions))


@pytest.mark.parametrize("pool", [None, Refusing(), Closed(), ThreadPoolExecutor(2)])
def test_every_region_comes_once_whatever_the_writers_do(regions: list[Region], pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "num_writers", lambda: 0 if pool is None else 2)
    monkeypatch.setattr(writers, "writer_pool", lambda: pool)
    monkeypatch.setattr(writers, "write", lambda *_: None)
    assert as_given(regions) == sorted(r.digest for r in regions)
    assert as_given(regions[:2]) == sorted(r.digest for r in regions[:2])


def test_code_that_is_on_disk_is_not_written_again(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(range(100))
    monkeypatch.setattr(writers, "num_writers", lambda: 2)
    monkeypatch.setattr(writers, "writer_pool", lambda: pytest.fail("a process was started"))
    monkeypatch.setattr(writers, "num_found_on_disk", lambda: next(found))
    assert as_given(regions) == sorted(r.digest for r in regions)


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
