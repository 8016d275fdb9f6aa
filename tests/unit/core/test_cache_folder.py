"""Caches: where they lie, who may read them, and that none of them is ever an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.core import cache_folder as module
from memfit.core.cache_folder import CacheWarning, cache_folder, find_trouble, use_cache_folder

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chosen = list(module._chosen)
    use_cache_folder(None)
    module._warn.cache_clear()
    monkeypatch.delenv("MEMFIT_CACHE_DIR", raising=False)
    yield
    module._chosen[:] = chosen
    module._warn.cache_clear()


def test_the_platforms_place_unless_somebody_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "memfit"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # such are ignored, says the standard
    assert cache_folder() == tmp_path / "home" / ".cache" / "memfit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("plans") == tmp_path / "xdg" / "memfit" / "plans"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "home" / "Library" / "Caches" / "memfit"
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_folders_are_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "own"))
        folder = cache_folder("plans")
    finally:
        os.umask(before)
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (0o700, 0o700)


def test_a_folder_where_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(shared))
    with pytest.warns(CacheWarning, match="other users may write there.*MEMFIT_CACHE_DIR") as said:
        folder, again = cache_folder("plans"), cache_folder("inductor")
    assert len(said) == 1
    assert shared not in folder.parents
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    assert folder.parent == again.parent
    assert not list(shared.iterdir())


@pytest.mark.parametrize("place", ["file/inside", "file", "nul\0byte"])
def test_a_place_that_cannot_be_is_said_once(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    use_cache_folder(tmp_path / place)
    with pytest.warns(CacheWarning, match="cannot keep anything") as said:
        folders = {cache_folder("plans") for _ in range(3)}
    assert len(said) == 1
    assert all(find_trouble(folder) is None for folder in folders)


def test_a_full_disk_is_noticed_before_anything_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file can be made on it."""

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, _: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", lambda **_: Full())
    assert find_trouble(tmp_path) == "No space left on device"


_PLAN = """
import json
import numpy as np
from memfit.core.budget import Budget
from memfit.planning import plan
from memfit.planning.plan_cache import CachedPlanner
from memfit.planning.search.auto import Portfolio
from memfit.planning.model.fast_judge import peak_and_time as measure_peak
from memfit.planning.jit.warm_up import _small_problem
from memfit.core.cache_folder import cache_folder
from memfit.pipeline.known_costs import Cache
problem = _small_problem()
costs = Cache()
found = costs.get("cpu", "an op")
costs.put("cpu", "an op", (3, 4))
costs.save()
measure_peak(problem.model.arrays, np.array(problem.model.agenda))
planner = CachedPlanner(planner=Portfolio(), folder=cache_folder("plans"))
outcome = plan(problem.graph, problem.costs, Budget(device_bytes=24), planner=planner)
print(json.dumps([found, outcome.require_plan().timeline.time_ns]))
"""


def _run(cache: Path) -> tuple[list[object], list[str]]:
    """What a process of its own found in its caches and planned, and the warnings it gave."""
    environment = {**os.environ, "MEMFIT_CACHE_DIR": str(cache), "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "always"}
    done = subprocess.run([sys.executable, "-c", _PLAN], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), re.findall("CacheWarning: (.*)", done.stderr)


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(
        {
            "empty": b"",
            "half": data[: len(data) // 2],
            "noise": bytes(range(256)) * 40,
            "deep": b"[" * 100_000,
            "huge numbers": re.sub(rb"\d+", b"9" * 400, data),
            "other text": b'{"a": {"b": [1.5, null, 1e999]}}',
        }[how]
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with costs, a plan and kernels."""
    folder = tmp_path_factory.mktemp("full")
    assert _run(folder) == ([None, 4], [])
    assert _run(folder) == ([[3, 4], 4], [])
    assert {".json", ".nbi", ".nbc"} <= {path.suffix for path in folder.rglob("*")}
    return folder


@pytest.mark.parametrize("how", ["empty", "half", "noise", "deep", "huge numbers", "other text"])
def test_damaged_files_are_made_anew(how: str, full: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(full, folder)
    for path in folder.rglob("*"):
        if path.is_file():
            _damage(path, how)
    repaired, warned = _run(folder)
    assert repaired[1] == 4
    assert warned == sorted(set(warned), key=warned.index)
    assert all("cannot be read" in text for text in warned)
    assert _run(folder) == ([[3, 4], 4], [])


def test_two_first_starts_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "MEMFIT_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    both = [
        subprocess.Popen([sys.executable, "-c", _PLAN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert all(json.loads(out)[1] == 4 and "Warning" not in err for out, err in said)
    assert _run(tmp_path) == ([[3, 4], 4], [])


def test_a_command_says_a_lost_cache_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "graph.csv").write_text(
        "id,lower,upper,size\n" + "".join(f"{k},{k},{k + 2 + 7 * k % 13},{1 + 5 * k % 17}\n" for k in range(1000))
    )
    (tmp_path / "file").touch()
    environment = {**os.environ, "MEMFIT_CACHE_DIR": str(tmp_path / "file"), "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "memfit", "pack", str(tmp_path / "graph.csv"), "--json", "--time-limit", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] in ("FEASIBLE", "OPTIMAL")
    assert done.stderr.strip().splitlines()[-1].startswith("warning: memfit cannot keep anything in")
    assert "warn_once" not in done.stderr


def test_warnings_are_said_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            module.warn_once("once")
            module.warn_once("twice")
    assert [str(w.message) for w in said] == ["once", "twice"]
