"""run_chain against the real thing: a process killed with SIGKILL, a file size limit, and a disk that is full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, resource, sys, time
import numpy as np
import memfit
from memfit.chain.run.levels import ChainCosts

folder, pause, limit_at = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
start = np.linspace(0.0, 1.0, 20_000)

def step(x, i):
    time.sleep(pause)
    if i == limit_at:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    return x + 0.1 * np.sin(x)

def adjoint(x, y, i):
    time.sleep(pause)
    return y * (1 + 0.1 * np.cos(x))

costs = ChainCosts(forward_s=1.0, disk_write_s=0.001, disk_read_s=0.001)
try:
    run = memfit.run_chain(step, adjoint, start, 60, seed=np.ones(20_000), budget=8 * start.nbytes, disk="100MB", folder=folder, costs=costs)
except memfit.StorageFailed as error:
    print(json.dumps({"error": str(error)}))
    sys.exit(7)
print(json.dumps({"sum": float(run.adjoint.sum()), "resumed_at": run.resumed_at, "forwards": run.num_forward, "backwards": run.num_backward}))
"""


def start(folder: Path, pause: float = 0.0, limit_at: int = -1) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", PROGRAM, str(folder), str(pause), str(limit_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, object]]:
    out, err = process.communicate(timeout=120)
    assert out, err
    return process.returncode, json.loads(out)


@pytest.fixture(scope="module")
def expected() -> float:
    x, states = np.linspace(0.0, 1.0, 20_000), []
    for _ in range(60):
        states.append(x)
        x = x + 0.1 * np.sin(x)
    y = np.ones(20_000)
    for x in reversed(states):
        y = y * (1 + 0.1 * np.cos(x))
    return float(y.sum())


@pytest.mark.parametrize("wait_for", ["state-30.mfs", "adjoint-*.mfs"])
def test_killed_and_resumed(tmp_path: Path, expected: float, wait_for: str) -> None:
    process = start(tmp_path, pause=0.02)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob(wait_for)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("state-*.mfs"))
    code, result = finish(start(tmp_path))
    assert code == 0
    assert result["sum"] == expected
    assert result["resumed_at"] is not None
    if wait_for.startswith("adjoint"):
        assert int(str(result["backwards"])) < 61
    else:
        assert int(str(result["forwards"])) < 60
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit_is_a_clear_error_and_the_run_goes_on_later(tmp_path: Path, expected: float) -> None:
    code, result = finish(start(tmp_path, limit_at=20))
    assert code == 7
    assert "the disk is full" in str(result["error"])
    assert "run_chain again with the same folder" in str(result["error"])
    assert not list(tmp_path.glob("*.tmp"))
    code, result = finish(start(tmp_path))
    assert (code, result["sum"]) == (0, expected)
    assert int(str(result["forwards"])) < 60


def test_a_really_full_disk(tmp_path: Path, expected: float) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        code, result = finish(start(disk / "run"))
        assert code == 7
        assert "the disk is full" in str(result["error"])
        saved = tmp_path / "saved"
        subprocess.run(["cp", "-r", str(disk / "run"), str(saved)], check=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    code, result = finish(start(saved))
    assert (code, result["sum"]) == (0, expected)
    assert result["resumed_at"] == 60
