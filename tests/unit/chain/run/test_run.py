"""run_chain on NumPy, torch and trees: exact adjoints, inside the budget, with real storage."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memfit
from memfit.chain.run.levels import ChainCosts
from memfit.chain.run.state_files import FILE_OVERHEAD_BYTES, StateFolder
from memfit.core import BadInput, InfeasibleBudget, StorageFailed, Unsupported

SIZE = 64
RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(SIZE, SIZE)) / SIZE**0.5
STATE = RNG.normal(size=SIZE)
BYTES = STATE.nbytes
SLOW_DISK = ChainCosts(forward_s=1e-3, disk_write_s=2e-3, disk_read_s=2e-3)
CHEAP_DISK = ChainCosts(forward_s=1.0, disk_write_s=1e-3, disk_read_s=1e-3)


def step(x: Any, i: int) -> Any:
    return np.tanh(MATRIX @ x) + 0.01 * i


def adjoint(x: Any, y: Any, i: int) -> Any:
    return MATRIX.T @ ((1 - np.tanh(MATRIX @ x) ** 2) * y)


def reference(num_steps: int) -> Any:
    states = [STATE]
    for i in range(num_steps):
        states.append(step(states[-1], i))
    y = 2 * states[-1]
    for i in range(num_steps - 1, -1, -1):
        y = adjoint(states[i], y, i)
    return y


def run(num_steps: int, **options: Any) -> Any:
    return memfit.run_chain(step, adjoint, STATE, num_steps, seed=lambda x: 2 * x, **options)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 41])
@pytest.mark.parametrize(
    "options",
    [
        {"budget": 5 * BYTES},
        {"budget": 8 * BYTES},
        {"budget": 500 * BYTES},
        {"budget": 6 * BYTES, "host": 3 * BYTES},
        {"budget": 6 * BYTES, "disk": "1MiB"},
        {"budget": 8 * BYTES, "disk": "1MiB", "costs": CHEAP_DISK},
        {"budget": 8 * BYTES, "disk": 6 * (BYTES + FILE_OVERHEAD_BYTES), "costs": SLOW_DISK},
        {"budget": 8 * BYTES, "disk": 6 * (BYTES + FILE_OVERHEAD_BYTES), "costs": CHEAP_DISK},
    ],
)
def test_adjoint_is_exact_and_inside_the_budget(num_steps: int, options: dict[str, Any]) -> None:
    result = run(num_steps, **options)
    np.testing.assert_array_equal(result.adjoint, reference(num_steps))
    assert result.num_backward == num_steps + 1
    assert result.peak_bytes <= options["budget"] + options.get("host", 0)


def test_measured_memory_is_inside_the_budget(tmp_path: Path) -> None:
    """tracemalloc sees every NumPy allocation of the run: slots, copies in flight, working buffers and the functions' own."""
    big = np.zeros(200_000)

    def grow(x: Any, i: int) -> Any:
        return x + i

    def back(x: Any, y: Any, i: int) -> Any:
        return y + x

    expected = memfit.run_chain(grow, back, big, 30, seed=big, budget="1GiB").adjoint
    for options in ({"budget": 8 * big.nbytes}, {"budget": 9 * big.nbytes, "disk": "1GB", "folder": tmp_path, "costs": CHEAP_DISK}):
        gc.collect()
        tracemalloc.start()
        result = memfit.run_chain(grow, back, big, 30, seed=big, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(result.adjoint, expected)
        assert peak <= options["budget"] * 1.02 + 200_000


def test_functions_may_overwrite_their_arguments() -> None:
    def step_in_place(x: Any, i: int) -> Any:
        x[:] = step(x, i)
        return x

    def adjoint_in_place(x: Any, y: Any, i: int) -> Any:
        y[:] = adjoint(x, y, i)
        x[:] = np.nan
        return y

    before = STATE.copy()
    for options in ({"budget": 7 * BYTES}, {"budget": 8 * BYTES, "disk": "1MiB", "costs": CHEAP_DISK}):
        result = memfit.run_chain(step_in_place, adjoint_in_place, STATE, 23, seed=lambda x: 2 * x, **options)
        np.testing.assert_array_equal(result.adjoint, reference(23))
    np.testing.assert_array_equal(STATE, before)


def test_without_a_seed_the_adjoint_function_starts_itself() -> None:
    def starting(x: Any, y: Any, i: int) -> Any:
        return 2 * x if y is None else adjoint(x, y, i)

    result = memfit.run_chain(step, starting, STATE, 9, budget=7 * BYTES)
    np.testing.assert_array_equal(result.adjoint, reference(9))


def test_functions_may_leave_out_the_step() -> None:
    result = memfit.run_chain(lambda x: x * x, lambda x, y: 2 * x * y, np.full(4, 1.1), 5, seed=np.ones(4), budget="1MB")
    np.testing.assert_allclose(result.adjoint, 32 * 1.1**31)
    with pytest.raises(BadInput, match="parameters"):
        memfit.run_chain(lambda: None, adjoint, STATE, 5, budget="1MB")


Pair = namedtuple("Pair", "u v")


@dataclass
class Fields:
    u: Any
    label: str
    extra: Any = None


@pytest.mark.parametrize("disk", [None, "1MB"])
def test_trees(disk: str | None) -> None:
    def forward(tree: Any, i: int) -> Any:
        return {"a": [step(tree["a"][0], i), tree["a"][1] + 1], "p": Pair(tree["p"].u * 1.5, np.float32(i)), "d": tree["d"]}

    def backward(tree: Any, y: Any, i: int) -> Any:
        return {"x": adjoint(tree["a"][0], y["x"], i), "sum": (y["sum"][0] + tree["a"][1] + float(tree["p"].v), None)}

    start = {"a": [STATE, 0], "p": Pair(np.ones((2, 3), dtype=np.float32), np.float32(0)), "d": Fields(np.arange(3), "name")}
    seed = {"x": STATE, "sum": (0.0, None)}
    expected = memfit.run_chain(forward, backward, start, 13, seed=seed, budget="1MB").adjoint
    result = memfit.run_chain(forward, backward, start, 13, seed=seed, budget=4000, disk=disk, costs=CHEAP_DISK).adjoint
    np.testing.assert_array_equal(result["x"], expected["x"])
    assert result["sum"] == expected["sum"] == (sum(range(13)) + sum(range(12)), None)


def test_torch_states() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.linspace(-1, 1, 16).reshape(4, 4).to(torch.bfloat16)
    start = {"h": torch.ones(4, dtype=torch.bfloat16), "t": torch.tensor(0.0)}

    def forward(x: Any, i: int) -> Any:
        return {"h": torch.tanh(weight @ x["h"]), "t": x["t"] + 1}

    def backward(x: Any, y: Any, i: int) -> Any:
        h = x["h"].detach().requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(weight @ h), h, y["h"])
        return {"h": grad, "t": y["t"] + x["t"]}

    seed = {"h": torch.ones(4, dtype=torch.bfloat16), "t": torch.tensor(0.0)}
    expected = memfit.run_chain(forward, backward, start, 17, seed=seed, budget="1MB").adjoint
    for options in ({"budget": 100}, {"budget": 100, "disk": "1MB", "costs": CHEAP_DISK}):
        result = memfit.run_chain(forward, backward, start, 17, seed=seed, **options)
        assert torch.equal(result.adjoint["h"], expected["h"])
        assert torch.equal(result.adjoint["t"], torch.tensor(float(sum(range(17)))))
        assert result.writes.get("disk", 0) > 0 or result.num_forward > 17


def test_long_chains_spread_their_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.chain.run.run.PLANNING_ADDITIONS", 10.0)
    room = 6 * (BYTES + FILE_OVERHEAD_BYTES)
    for options in ({"budget": 8 * BYTES, "disk": room}, {"budget": 6 * BYTES, "disk": room}, {"budget": 8 * BYTES, "disk": "1MB"}):
        result = run(50, costs=CHEAP_DISK, **options)
        np.testing.assert_array_equal(result.adjoint, reference(50))
        assert result.writes["disk"] > 0


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 7, 30, 31, 39, 52, 60])
@pytest.mark.parametrize("disk", ["1MB", str(6 * (BYTES + FILE_OVERHEAD_BYTES))])
def test_an_interrupted_run_goes_on(tmp_path: Path, stop_at: int, disk: str) -> None:
    calls = 0

    def failing(function: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Stop
            return function(*arguments)

        return wrapped

    options = {"budget": 8 * BYTES, "disk": disk, "folder": tmp_path, "costs": CHEAP_DISK, "seed": lambda x: 2 * x}
    with pytest.raises(Stop):
        memfit.run_chain(failing(step), failing(adjoint), STATE, 30, **options)
    again = memfit.run_chain(step, adjoint, STATE, 30, **options)
    np.testing.assert_array_equal(again.adjoint, reference(30))
    assert list(tmp_path.iterdir()) == []
    if stop_at >= 7:
        assert again.resumed_at is not None
    if stop_at >= 52 and disk == "1MB":  # every state on disk: each one done is an adjoint saved
        assert again.num_backward < 31


def test_damaged_files_are_done_without(tmp_path: Path) -> None:
    def stopping(x: Any, y: Any, i: int) -> Any:
        if i == 12:
            raise Stop
        return adjoint(x, y, i)

    options = {"budget": 8 * BYTES, "disk": "1MB", "folder": tmp_path, "costs": CHEAP_DISK, "seed": lambda x: 2 * x}
    with pytest.raises(Stop):
        memfit.run_chain(step, stopping, STATE, 30, **options)
    states = sorted(tmp_path.glob("state-*.mfs"))
    assert len(states) > 3
    states[0].write_bytes(states[0].read_bytes()[:-9])
    data = bytearray(states[1].read_bytes())
    data[-20] ^= 1
    states[1].write_bytes(data)
    states[2].write_bytes(b"")
    (tmp_path / "state-3.tmp").write_bytes(b"half")
    result = memfit.run_chain(step, adjoint, STATE, 30, **options)
    np.testing.assert_array_equal(result.adjoint, reference(30))


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    def stopping(x: Any, y: Any, i: int) -> Any:
        raise Stop

    options = {"budget": 8 * BYTES, "disk": "1MB", "folder": tmp_path, "costs": CHEAP_DISK}
    with pytest.raises(Stop):
        memfit.run_chain(step, stopping, STATE, 30, **options)
    with pytest.raises(BadInput, match="another run"):
        memfit.run_chain(step, adjoint, STATE, 31, **options)
    with pytest.raises(BadInput, match="another run"):
        memfit.run_chain(step, adjoint, STATE + 1, 30, **options)
    result = memfit.run_chain(step, adjoint, STATE, 31, seed=lambda x: 2 * x, resume=False, **options)
    np.testing.assert_array_equal(result.adjoint, reference(31))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    other = StateFolder(tmp_path)
    with pytest.raises(BadInput, match="another run is using"):
        run(5, budget=8 * BYTES, folder=tmp_path)
    other.close(remove=True)
    (tmp_path / "notes.txt").write_text("mine")
    run(5, budget=8 * BYTES, folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_write_is_an_error_that_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, writes = StateFolder.write, 0

    def full(self: StateFolder, kind: str, at: int, tree: Any) -> None:
        nonlocal writes
        writes += 1
        if writes > 5:
            raise self._failure(kind, at, 10, OSError(28, "No space left on device"))
        real(self, kind, at, tree)

    monkeypatch.setattr(StateFolder, "write", full)
    options = {"budget": 8 * BYTES, "disk": "1MB", "folder": tmp_path, "costs": CHEAP_DISK}
    with pytest.raises(StorageFailed, match=r"the disk is full.*5 complete checkpoints"):
        run(30, **options)
    monkeypatch.setattr(StateFolder, "write", real)
    result = run(30, **options)
    np.testing.assert_array_equal(result.adjoint, reference(30))
    assert result.resumed_at == 30
    assert result.num_forward < 30 + 30


def test_writes_run_behind_the_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write ends only after a later step was computed: written in line, it would wait for ever."""
    real, computed, overlapped = StateFolder.write, threading.Event(), []

    def slow(self: StateFolder, kind: str, at: int, tree: Any) -> None:
        if kind == "state" and not overlapped:
            computed.clear()
            overlapped.append(computed.wait(timeout=20))
        real(self, kind, at, tree)

    def signalling(x: Any, i: int) -> Any:
        computed.set()
        return step(x, i)

    monkeypatch.setattr(StateFolder, "write", slow)
    result = memfit.run_chain(signalling, adjoint, STATE, 20, seed=lambda x: 2 * x, budget=8 * BYTES, disk="1MB", costs=CHEAP_DISK)
    np.testing.assert_array_equal(result.adjoint, reference(20))
    assert overlapped == [True]


def test_reads_run_ahead_of_the_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backward step waits until the read of the next state has begun: read in line, it would wait for ever."""
    real, begun, overlapped = StateFolder.read, {i: threading.Event() for i in range(21)}, []

    def telling(self: StateFolder, kind: str, at: int, model: Any = None) -> Any:
        begun[at].set()
        return real(self, kind, at, model)

    def waiting(x: Any, y: Any, i: int) -> Any:
        if 3 < i < 18:
            overlapped.append(begun[i - 1].wait(timeout=20))
        return adjoint(x, y, i)

    monkeypatch.setattr(StateFolder, "read", telling)
    result = memfit.run_chain(step, waiting, STATE, 20, seed=lambda x: 2 * x, budget=6 * BYTES, disk="1MB", costs=CHEAP_DISK)
    np.testing.assert_array_equal(result.adjoint, reference(20))
    assert overlapped == [True] * 14


def test_budgets_that_cannot_work_say_the_number() -> None:
    with pytest.raises(InfeasibleBudget, match="below the minimum") as caught:
        run(5, budget=4 * BYTES)
    minimum = caught.value.minimum_bytes
    np.testing.assert_array_equal(run(5, budget=minimum).adjoint, reference(5))
    with pytest.raises(InfeasibleBudget):
        run(5, budget=6 * BYTES - 1, disk="1MB")
    with pytest.raises(InfeasibleBudget, match="no level has room"):
        run(5, budget=6 * BYTES, disk="100")
    with pytest.raises(BadInput):
        run(5, budget="banana")
    with pytest.raises(BadInput):
        run(-1, budget="1MB")


def test_states_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(Unsupported, match="set"):
        memfit.run_chain(step, adjoint, {1, 2}, 3, budget="1MB")
    with pytest.raises(Unsupported, match="Python objects"):
        memfit.run_chain(step, adjoint, np.array([object()]), 3, budget="1MB")
    with pytest.raises(Unsupported, match="one size"):
        memfit.run_chain(lambda x, i: np.append(x, 0.0), adjoint, STATE, 5, budget="1MB", seed=STATE)
    with pytest.raises(BadInput, match="adjoint_bytes"):
        memfit.run_chain(step, adjoint, STATE, 5, budget="1MB", seed=lambda x: np.zeros(500))


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run(10, budget=8 * BYTES, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "chain" in captured.err


def test_forward_is_never_called_more_often_than_planned() -> None:
    calls = 0

    def counted(x: Any, i: int) -> Any:
        nonlocal calls
        calls += 1
        return step(x, i)

    result = memfit.run_chain(counted, adjoint, STATE, 33, seed=lambda x: 2 * x, budget=8 * BYTES)
    assert calls == result.num_forward
