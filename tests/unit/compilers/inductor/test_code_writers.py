"""Code written by other processes: a graph survives the journey, what was written is found, and no failure loses a region."""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import needs_a_compiler
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LambdaFuture
from torch._inductor.utils import fresh_cache

from memfit.capture.inputs import Call
from memfit.compilers.inductor import code_writers as writers
from memfit.compilers.inductor import compiler as inductor
from memfit.compilers.inductor import writer_pool as pools
from memfit.compilers.inductor.code_writers import GraphText, start_writer, wake_writers, write_code, yield_written
from memfit.compilers.inductor.compiler import Inductor
from memfit.compilers.inductor.settings import Settings
from memfit.compilers.inductor.writer_pool import end_writer_pool, writer_pool
from memfit.passes.regions.piece import Region
from memfit.passes.regions.regions import regions_of
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task


def num_found_on_disk() -> int:
    return int(counters["inductor"]["fxgraph_cache_hit"])


@pytest.fixture(scope="module")
def regions() -> list[Region]:
    """Constants, views, several outputs, random numbers, a loss."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(3 + k, 4 + k, 3, padding=1), nn.BatchNorm2d(4 + k), nn.ReLU(), nn.Dropout(0.1)) for k in range(3)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    task = Task(model=model, loss_fn=nn.functional.cross_entropy, num_targets=1, engine="inductor")
    call = Call.flatten((torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))), {})
    first = next(Forms(task, call).usual()).captured
    return regions_of(first)


def test_a_graph_that_is_sent_is_the_same_code(regions: list[Region]) -> None:
    assert len(regions) >= 8
    for region in regions:
        module, samples = region.source()
        text = GraphText.of(module, samples)
        assert text is not None
        again, fakes = text.read()
        assert again.code == module.code
        assert [(f.shape, f.stride(), f.dtype) for f in fakes] == [(s.shape, s.stride(), s.dtype) for s in samples]


def test_a_graph_that_calls_python_is_not_sent() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    graph = torch.fx.Graph()
    graph.output((graph.call_function(own, (graph.placeholder("x"),)),))
    assert GraphText.of(torch.fx.GraphModule(nn.Module(), graph), [torch.zeros(2)]) is None
    graph = torch.fx.Graph()
    graph.output((graph.call_function(operator.getitem, (graph.placeholder("x"), 0)),))
    assert GraphText.of(torch.fx.GraphModule(nn.Module(), graph), [torch.zeros(2)]) is not None


@needs_a_compiler
def test_what_was_written_is_found_on_disk(regions: list[Region]) -> None:
    build = AsyncCompile.__dict__["triton"]
    module, samples = max(regions, key=lambda r: r.num_ops).source()
    with fresh_cache():
        text = GraphText.of(module, samples)
        assert text is not None
        write_code(text, Settings.here())
        before = num_found_on_disk()
        Inductor().compile(module, samples)
        assert num_found_on_disk() == before + 1
    assert AsyncCompile.__dict__["triton"] is build  # left out only while code is written


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
        self.how, self.written = how, list[GraphText]()

    def submit(self, function: Any, *given: Any) -> Future[None]:
        if self.how == "closed":
            raise RuntimeError("Attempting to use a closed pool")
        job: Future[None] = Future()
        if self.how == "fails" and function is write_code:
            job.set_exception(RuntimeError("killed"))
        elif self.how != "hangs" or function is not write_code:
            job.set_result(None)
        if function is write_code:
            self.written.append(given[0])
        return job


def compiled_with(
    pool: Pool, regions: Sequence[Region], seconds_each: float, monkeypatch: pytest.MonkeyPatch, *, awake: bool = False
) -> list[str]:
    """Digests in the order of compiling, by a clock that only moves when something is compiled."""
    clock = [0.0]
    monkeypatch.setattr(writers, "num_writers", lambda: 2)
    monkeypatch.setattr(writers, "writer_pool", lambda: pool)
    monkeypatch.setattr(writers, "_WRITERS", writers._Writers())
    monkeypatch.setattr(writers, "_PATIENCE_S", 0.01)
    if awake:
        writers._WRITERS.wake()
    monkeypatch.setattr(writers.time, "perf_counter", lambda: clock[0])
    order = []
    for region in yield_written(regions):
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


def test_writers_that_are_awake_have_the_largest_from_the_beginning(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("works")
    order = compiled_with(pool, regions, 0.001, monkeypatch, awake=True)
    assert sorted(order) == sorted(r.digest for r in regions)
    sizes = {r.digest: r.num_ops for r in regions}
    assert len(pool.written) == len(regions)
    assert sizes[order[0]] == max(sizes.values())


def test_the_last_regions_are_waited_for_not_long(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    pool, settled = Pool("hangs"), list[int]()
    monkeypatch.setattr(writers, "num_writers", lambda: 2)
    monkeypatch.setattr(writers, "writer_pool", lambda: pool)
    monkeypatch.setattr(writers, "_WRITERS", writers._Writers())
    monkeypatch.setattr(writers, "_PATIENCE_S", 0.01)
    writers._WRITERS.wake()
    two = sorted(regions, key=lambda r: r.num_ops)[:2]
    assert {r.digest for r in yield_written(two, lambda: settled.append(1))} == {r.digest for r in two}
    assert settled == [1]  # a moment, and then nobody is waited for again


@pytest.mark.parametrize(
    ("device", "cores", "woken"), [("cuda", 16, 16), ("cuda:1", 4, 4), ("cuda", 3, 0), ("cuda", 1, 0), ("cuda", 0, 0), ("cpu", 16, 0)]
)
def test_writers_are_woken_early_for_a_gpu_by_a_machine_with_cores(
    device: str, cores: int, woken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = list[tuple[Any, ...]]()

    class Recording(Pool):
        def submit(self, function: Any, *given: Any) -> Future[None]:
            jobs.append((function, *given))
            return super().submit(function, *given)

    monkeypatch.setattr(writers, "num_writers", lambda: cores)
    monkeypatch.setattr(writers, "writer_pool", lambda: Recording("works"))
    monkeypatch.setattr(writers, "_WRITERS", writers._Writers())
    wake_writers(torch.device(device))
    wake_writers(torch.device(device))
    assert len(jobs) == woken  # once
    assert all(function is start_writer and text.samples[0][-1] == torch.device(device) for function, _, text in jobs)


def test_three_of_four_cores_write(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for threads in (1, 2, 4, 8, 16, 64):
        with config.patch(compile_threads=threads):
            counts[threads] = pools.num_writers()
    assert counts == {1: 0, 2: 1, 4: 3, 8: 6, 16: 12, 64: 12}
    with config.patch(compile_threads=16, fx_graph_cache=False):
        assert pools.num_writers() == 0


@pytest.fixture
def two_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(pools, "num_writers", lambda: 2)
    end_writer_pool()
    yield writer_pool()
    end_writer_pool()


@needs_a_compiler
def test_other_processes_write_for_this_one(regions: list[Region], two_writers: Any) -> None:
    module, samples = min(regions, key=lambda r: abs(r.num_ops - 6)).source()
    text = GraphText.of(module, samples)
    assert text is not None
    with fresh_cache():
        two_writers.submit(write_code, text, Settings.here()).result(timeout=300)
        before = num_found_on_disk()
        Inductor().compile(module, samples)
        assert num_found_on_disk() == before + 1


def _processes_of(group: int) -> list[str]:
    """States of the processes of a group that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(state)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_writers_are_forked_from_one_that_has_imported_all_and_end_together(two_writers: Any) -> None:
    two_writers.submit(start_writer, Settings.here(), None).result(timeout=300)
    assert len(_processes_of(two_writers.process.pid)) == 3
    end_writer_pool()
    assert two_writers.process.poll() is not None
    deadline = time.monotonic() + 30
    while _processes_of(two_writers.process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _processes_of(two_writers.process.pid)
    end_writer_pool()  # nothing to end


def test_regions_come_though_all_writers_die(regions: list[Region], two_writers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "num_writers", lambda: 2)
    monkeypatch.setattr(writers, "_WRITERS", writers._Writers())
    monkeypatch.setattr(writers, "_PATIENCE_S", 0.5)
    writers._WRITERS.wake()
    writers._WRITERS._waking[0].result(timeout=300)
    came = yield_written(regions)
    first = next(came)
    two_writers.process.kill()
    assert sorted(r.digest for r in (first, *came)) == sorted(r.digest for r in regions)


def test_ops_that_were_asked_when_traced_are_not_traced_again(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    monkeypatch.setattr(inductor, "_decompose", lambda module, _: traced.append(module) or module)
    monkeypatch.setattr(inductor, "_compile", lambda *_: len)
    for region in regions:
        Inductor().compile(*region.source())
    losses = [m for m in traced if any(n.target in inductor._LOSS for n in m.graph.nodes)]
    assert losses
    assert len(traced) == len(losses)
    assert any(n.target is torch.ops.aten.add.Tensor for r in regions for n in r.source()[0].graph.nodes)


@needs_a_compiler
def test_what_is_not_traced_again_is_the_same_code(regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[str]()
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda _, __, source: written.append(source))
    compared = 0
    for region in regions[::3]:
        module, samples = region.source()
        targets = {n.target for n in module.graph.nodes}
        if targets.isdisjoint(inductor._ASKED_BEFORE) or targets.intersection(inductor._LOSS):
            continue
        written.clear()
        with fresh_cache():
            inductor._compile(module, samples)
            plain = list(written)
            written.clear()
            inductor._compile(inductor._decompose(module, samples), samples)
        assert plain
        assert plain == written
        compared += 1
    assert compared >= 3


def test_kernels_are_queued_before_their_builders_are_awake() -> None:
    before = AsyncCompile.__dict__["use_process_pool"], AsyncCompile.__dict__["wait"]
    with config.patch(compile_threads=4), Inductor().together():
        assert AsyncCompile.use_process_pool()
    with config.patch(compile_threads=1), Inductor().together():
        assert not AsyncCompile.use_process_pool()
    assert (AsyncCompile.__dict__["use_process_pool"], AsyncCompile.__dict__["wait"]) == before


def test_kernels_that_are_built_are_taken_in_meanwhile() -> None:
    done, running = Future[int](), Future[int]()
    done.set_result(1)
    ready = {"kernel": LambdaFuture(lambda: len, future=done)}  # type: ignore[arg-type]
    later = {"kernel": LambdaFuture(lambda: max, future=running)}  # type: ignore[arg-type]
    with config.patch(compile_threads=4):
        with Inductor().together() as settle:
            for scope in (ready, later):
                AsyncCompile().wait(scope)
            assert not settle()
            assert ready["kernel"] is len  # type: ignore[comparison-overlap]
            assert later["kernel"] is not max  # type: ignore[comparison-overlap]
            running.set_result(2)
            assert settle()
        assert later["kernel"] is max  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_code_is_written(enabled: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with Inductor().together():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_on else gc.disable)()
