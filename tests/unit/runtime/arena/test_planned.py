"""The books behind planned arenas, over the heap: recorded, packed, replayed; what deviates never overlaps anything."""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit
from memfit.core.lifetimes import Lifetime, max_load
from memfit.offsets import tight_layout
from memfit.runtime.arena.library import Library, build, load_malloc
from memfit.runtime.arena.planned import BLOCK_BYTES, Allocator, Run, StepArena

PAGE = 2 * 2**20
MIB = 2**20
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arena"), malloc=True)


@pytest.fixture
def fresh(compiled: Path, tmp_path: Path) -> Callable[[], Device]:
    """Makes devices with books of their own: a library at another path is another library."""
    count = iter(range(10**6))

    def make() -> Device:
        folder = tmp_path / str(next(count))
        shutil.copytree(compiled.parent, folder)
        return Device(load_malloc(folder))

    return make


@pytest.fixture
def device(fresh: Callable[[], Device]) -> Device:
    return fresh()


class Device:
    """What torch would do: takes and gives back blocks, fills each with its own pattern and looks whether it is still there."""

    def __init__(self, library: Library) -> None:
        self.allocator = Allocator(library)
        self.library = library
        self.live: dict[int, tuple[int, int]] = {}  # address -> size, pattern
        self.count = 0

    def step(self, device: int = 0) -> StepArena:
        return StepArena(self.allocator, device, partial(tight_layout, alignment_bytes=BLOCK_BYTES))

    def take(self, size: int, *, device: int = 0, stream: int = 0) -> int | None:
        address = self.library.functions.memfit_alloc(size, device, stream)
        if address is None:
            return None
        for other, (length, _) in self.live.items():
            assert address + size <= other or other + length <= address, "two live blocks overlap"
        assert address % BLOCK_BYTES == 0
        self.count += 1
        ctypes.memset(address, self.count % 251, size)
        self.live[address] = (size, self.count % 251)
        return int(address)

    def give(self, address: int, *, device: int = 0, stream: int = 0) -> None:
        size, pattern = self.live.pop(address)
        assert ctypes.string_at(address, size) == bytes([pattern]) * size, "somebody wrote into a live block"
        self.library.functions.memfit_free(address, size, device, stream)

    def in_arena(self) -> int:
        return self.allocator.stats(0).num_in_arena


SIZES = [3 * MIB, 1000, MIB, 5 * MIB, 700 * 1024, 2 * MIB]


def train(device: Device, run: Run, sizes: list[int], *, keep: int = 0) -> list[int]:
    """Forward allocates and frees every third, backward frees the rest from the last on; `keep` of the first survive."""
    held: list[int] = []
    with run:
        for k, size in enumerate(sizes):
            address = device.take(size)
            assert address is not None
            held.append(address)
            if k % 3 == 2:
                device.give(held.pop(-2))
    kept = held[:keep]
    with run:
        while len(held) > keep:
            device.give(held.pop())
    run.finish()
    return kept


def load_of(device: Device, sizes: list[int]) -> int:
    """The most bytes `train` holds at once."""
    held: list[int] = []
    peak = 0
    for k, size in enumerate(sizes):
        held.append(-(-size // 512) * 512)
        peak = max(peak, sum(held))
        if k % 3 == 2:
            held.pop(-2)
    return peak


def test_the_second_step_lies_in_one_arena_as_high_as_the_load(device: Device) -> None:
    step = device.step()
    train(device, step.start(), SIZES)
    assert step.height_bytes is None
    assert device.in_arena() == 0
    train(device, step.start(), SIZES)
    assert step.height_bytes == load_of(device, SIZES)
    assert device.in_arena() == len(SIZES)
    stats = device.allocator.stats(0)
    assert stats.arena_bytes == -(-step.height_bytes // PAGE) * PAGE
    assert stats.reserved_bytes == stats.arena_bytes
    assert stats.allocated_bytes == 0
    assert step.reserved_bytes() == stats.arena_bytes
    for _ in range(5):
        train(device, step.start(), SIZES)
    assert step.num_packings == 1
    assert device.in_arena() == 6 * len(SIZES)


def test_what_outlives_its_step_is_kept_out_of_the_arena(device: Device) -> None:
    step = device.step()
    old: list[int] = []
    for _ in range(6):
        new = train(device, step.start(), SIZES, keep=1)  # like a loss that is assigned over the one before
        for address in old:
            device.give(address)
        old = new
    assert step.num_packings <= 2
    last = step.allocator.unsettled
    assert last is not None
    assert device.library.verdict(last[1]).is_clean
    before = device.in_arena()
    train(device, step.start(), SIZES, keep=1)
    assert device.in_arena() - before == len(SIZES) - 1


def test_what_dies_between_steps_shares_the_arena(device: Device) -> None:
    """Gradients freed by zero_grad before the next forward cost the arena nothing more."""
    step = device.step()
    for _ in range(4):
        for address in train(device, step.start(), SIZES, keep=2):
            device.give(address)
    assert step.num_packings == 1
    assert device.in_arena() == 3 * len(SIZES)


@pytest.mark.parametrize(
    "sizes",
    [[*SIZES, 4 * MIB], SIZES[:-2], [7 * MIB, *SIZES], SIZES[::-1], [8 * MIB] * 6, [*SIZES[:2], 9 * MIB, *SIZES[2:]]],
    ids=["one more", "fewer", "one before", "reversed", "other sizes", "one between"],
)
def test_another_sequence_falls_back_and_is_packed_anew(device: Device, sizes: list[int]) -> None:
    step = device.step()
    for _ in range(3):
        train(device, step.start(), SIZES)
    for _ in range(3):
        train(device, step.start(), sizes)  # `take` and `give` check for overlaps and overwritten bytes
    before = device.in_arena()
    train(device, step.start(), sizes)
    assert device.in_arena() - before == len(sizes)
    assert step.height_bytes == load_of(device, sizes)


def test_a_step_that_never_repeats_itself_is_not_packed_for_ever(device: Device) -> None:
    random, step = Random(1), device.step()
    for _ in range(20):
        train(device, step.start(), [random.randrange(1, 3 * MIB) for _ in range(9)])
    assert step.num_packings <= 8


def test_two_steps_in_flight_do_not_meet(device: Device) -> None:
    step = device.step()
    for _ in range(2):
        train(device, step.start(), SIZES)
    first, second = step.start(), step.start()
    with first:
        a = [device.take(s) for s in SIZES]
    with second:
        b = [device.take(s) for s in SIZES]
    for address in [*a, *b]:
        assert address is not None
        device.give(address)
    first.finish()
    second.finish()
    train(device, step.start(), SIZES)


def test_other_threads_streams_and_devices_get_none_of_it(device: Device) -> None:
    step = device.step()
    for _ in range(2):
        train(device, step.start(), SIZES)
    before = device.in_arena()
    taken: list[int | None] = []
    run = step.start()
    with run:
        thread = threading.Thread(target=lambda: taken.append(device.take(SIZES[0])))
        thread.start()
        thread.join()
        assert device.in_arena() == before
        taken.append(device.take(SIZES[0]))
        assert device.in_arena() == before + 1
        taken.append(device.take(SIZES[1], stream=7))  # the arena's live bytes are ordered by stream 0
        taken.append(device.take(SIZES[2], device=1))
        assert device.in_arena() == before + 1
    for address in taken:
        assert address is not None
        device.give(address)


def test_an_empty_arena_moves_to_another_stream(device: Device) -> None:
    step = device.step()
    for _ in range(2):
        train(device, step.start(), SIZES)
    before = device.in_arena()
    with step.start():
        address = device.take(SIZES[0], stream=7)
    assert device.in_arena() == before + 1
    assert address is not None
    device.give(address)


def test_outside_a_run_nothing_comes_from_the_arena(device: Device) -> None:
    step = device.step()
    for _ in range(2):
        train(device, step.start(), SIZES)
    before = device.in_arena()
    address = device.take(SIZES[0])
    assert address is not None
    device.give(address)
    assert device.in_arena() == before


def test_the_arena_is_as_high_as_its_highest_program_and_shrinks_when_that_goes(device: Device) -> None:
    small, large = device.step(), device.step()
    for _ in range(2):
        train(device, small.start(), SIZES)
    low = device.allocator.stats(0).arena_bytes
    for _ in range(2):
        train(device, large.start(), [4 * s for s in SIZES])
    high = device.allocator.stats(0).arena_bytes
    assert high > low
    train(device, small.start(), SIZES)
    assert device.allocator.stats(0).arena_bytes == high
    device.allocator.settle()
    del large
    gc.collect()
    assert device.allocator.stats(0).arena_bytes == low
    train(device, small.start(), SIZES)


def test_an_arena_that_grows_under_live_blocks_lets_the_old_one_live_out(device: Device) -> None:
    small, large = device.step(), device.step()
    for _ in range(2):
        train(device, small.start(), SIZES)
    run = small.start()
    with run:
        held = [device.take(s) for s in SIZES]
    low = device.allocator.stats(0).arena_bytes
    for _ in range(2):
        train(device, large.start(), [4 * s for s in SIZES])
    both = device.allocator.stats(0).arena_bytes
    assert both > 2 * low
    for address in held:
        assert address is not None
        device.give(address)
    assert device.allocator.stats(0).arena_bytes == both - low


def test_without_room_for_an_arena_all_comes_from_the_pool(device: Device) -> None:
    step = device.step()
    train(device, step.start(), SIZES)
    device.library.functions.memfit_limit_heap(load_of(device, SIZES))  # an arena is rounded up to whole pages: no room
    train(device, step.start(), SIZES)
    assert step.height_bytes is None
    assert device.in_arena() == 0
    device.library.functions.memfit_limit_heap(-1)
    train(device, step.start(), SIZES)
    assert step.height_bytes == load_of(device, SIZES)


def test_out_of_memory_is_said_and_survived(device: Device) -> None:
    device.library.functions.memfit_limit_heap(4 * MIB)
    first = device.take(3 * MIB)
    assert first is not None
    assert device.take(3 * MIB) is None
    device.give(first)
    again = device.take(3 * MIB)
    assert again is not None
    device.give(again)


def test_a_fraction_of_the_device_limits_what_is_given(device: Device) -> None:
    device.library.functions.memfit_limit_heap(16 * MIB)
    device.library.functions.memfit_set_fraction(0.5, 0)
    first = device.take(7 * MIB)
    assert first is not None
    assert device.take(3 * MIB) is None
    device.library.functions.memfit_set_fraction(1.0, 0)
    second = device.take(3 * MIB)
    assert second is not None
    device.give(first)
    device.give(second)


def test_peaks_are_counted_and_reset(device: Device) -> None:
    a, b = device.take(3 * MIB), device.take(MIB)
    assert a is not None
    assert b is not None
    device.give(a)
    assert device.allocator.stats(0).allocated_peak_bytes == 4 * MIB
    device.library.functions.memfit_reset_peaks(0)
    assert device.allocator.stats(0).allocated_peak_bytes == MIB
    device.give(b)
    assert device.allocator.stats(0).allocated_bytes == 0


def test_an_abandoned_forward_leaves_nothing_behind(device: Device) -> None:
    step = device.step()
    for _ in range(2):
        train(device, step.start(), SIZES)
    run = step.start()
    with run:
        held = [device.take(s) for s in SIZES]
    del run
    gc.collect()
    for address in held:
        assert address is not None
        device.give(address)
    before = device.in_arena()
    train(device, step.start(), SIZES)
    assert device.in_arena() - before == len(SIZES)


def test_a_run_inside_a_run_goes_back_to_the_outer_one(device: Device) -> None:
    outer, inner = device.step(), device.step()
    for _ in range(2):
        train(device, outer.start(), SIZES)
    before = device.in_arena()
    with outer.start():
        with inner.start():
            x = device.take(SIZES[0])
        assert device.in_arena() == before
        y = device.take(SIZES[0])
        assert device.in_arena() == before + 1
    for address in (x, y):
        assert address is not None
        device.give(address)


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Allocations from few sizes, frees, and steps that begin, pause, resume and end in any order."""
    action = st.one_of(
        st.tuples(st.just("take"), st.sampled_from([512, 1024, 4096, 5000, 70000])),
        st.tuples(st.just("give"), st.integers(0, 50)),
        st.tuples(st.sampled_from(["start", "enter", "leave", "finish"]), st.integers(0, 2)),
    )
    return draw(st.lists(action, min_size=5, max_size=120))


@given(scripts())
@settings(max_examples=150, deadline=None)
def test_no_script_makes_blocks_overlap(shared: Device, script: list[tuple[str, int]]) -> None:
    device = shared
    steps = [device.step() for _ in range(3)]
    runs: dict[int, Run] = {}
    inside: Run | None = None
    for action, value in script * 2:  # the second time round there is something to replay
        if action == "take":
            with inside if inside is not None else nullcontext():
                assert device.take(value) is not None
        elif action == "give" and device.live:
            device.give(list(device.live)[value % len(device.live)])
        elif action == "start":
            runs[value] = inside = steps[value].start()
        elif action == "enter":
            inside = runs.get(value, inside)
        elif action == "leave":
            inside = None
        elif action == "finish" and value in runs:
            run = runs.pop(value)
            inside = None if inside is run else inside
            run.finish()
    assert device.allocator.stats(0).allocated_bytes == sum(-(-s // 512) * 512 for s, _ in device.live.values())
    for address in list(device.live):
        device.give(address)


@pytest.fixture(scope="module")
def shared(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    folder = tmp_path_factory.mktemp("shared")
    shutil.copy(compiled, folder / compiled.name)
    device = Device(load_malloc(folder))
    yield device
    assert device.in_arena() > 0, "no script ever reached the arena: the property above showed nothing"


@given(st.lists(st.tuples(st.integers(1, 40000), st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_step_repeated_lies_in_the_arena_whole(shared: Device, rows: list[tuple[int, int, int]]) -> None:
    """Whatever is allocated and freed in whatever order: the third time all of it is at its planned place, as high as the solver says."""
    device, step = shared, shared.step()
    events = sorted([(a, 1, k) for k, (_, a, _) in enumerate(rows)] + [(a + n, 0, k) for k, (_, a, n) in enumerate(rows)])

    def once() -> None:
        held: dict[int, int] = {}
        run = step.start()
        with run:
            for _, is_birth, k in events:
                if is_birth:
                    address = device.take(rows[k][0])
                    assert address is not None
                    held[k] = address
                else:
                    device.give(held.pop(k))
        run.finish()

    once()
    once()
    before = device.in_arena()
    once()
    assert device.in_arena() - before == len(rows)
    items = [Lifetime(storage=-1, start=a, stop=a + n, size_bytes=-(-s // 512) * 512) for s, a, n in rows]
    assert step.height_bytes is not None
    assert step.height_bytes <= 1.5 * max_load(items)


def test_without_cuda_it_says_so() -> None:
    if torch.version.cuda is None:
        with pytest.raises(memfit.Unsupported, match="built without CUDA"):
            memfit.use_planned_arena()


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(memfit.Unsupported, match=r"C\+\+ compiler"):
        build(tmp_path, malloc=True)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(memfit.Unsupported, match="could not be compiled"):
        build(tmp_path, malloc=True)


def test_a_library_of_which_half_is_there_is_built_again(tmp_path: Path) -> None:
    """Loaded, it would end the process."""
    path = build(tmp_path, malloc=True)
    whole, built_ns = path.read_bytes(), path.stat().st_mtime_ns
    assert build(tmp_path, malloc=True).stat().st_mtime_ns == built_ns
    path.write_bytes(whole[: len(whole) // 2])
    assert build(tmp_path, malloc=True).read_bytes() == whole
    load_malloc(tmp_path)
