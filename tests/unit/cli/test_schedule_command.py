"""`memfit schedule` as a user runs it: data on stdout, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.tasks import judge_order, parse_tasks, schedule

SOURCE = Path(__file__).parents[3] / "src"
DIAMOND = {
    "tasks": [{"id": name, "output_bytes": size, "memory_bytes": 1, "time": 2} for name, size in zip("abcd", (4, 10, 3, 1), strict=True)],
    "edges": [["a", "b"], ["a", "c"], ["b", "d"], ["c", "d"]],
}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memfit", "schedule", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)})


@pytest.fixture
def diamond(tmp_path: Path) -> str:
    path = tmp_path / "diamond.json"
    path.write_text(json.dumps(DIAMOND))
    return str(path)


def test_json_holds_what_was_promised(diamond: str) -> None:
    done = _run(diamond, "--processors", "1", "--memory", "8GiB", "--algorithm", "auto", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert {"status", "algorithm", "peak_bytes", "lower_bound_bytes", "makespan", "order", "seconds"} <= set(data)
    assert (data["status"], data["makespan"]) == ("OPTIMAL", 8)
    graph = parse_tasks(json.dumps(DIAMOND))
    assert (
        judge_order(graph, [list(graph.names).index(t) for t in data["order"]]).peak_bytes
        == data["peak_bytes"]
        == data["lower_bound_bytes"]
    )


def test_processors_give_start_times_and_a_picture(diamond: str, tmp_path: Path) -> None:
    picture, output = tmp_path / "gantt.png", tmp_path / "plan.json"
    done = _run(diamond, "-p", "2", "-m", "1kB", "--json", "--png", str(picture), "-o", str(output))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert dict(zip(data["order"], data["start_times"], strict=True)) == {"a": 0, "b": 2, "c": 2, "d": 4}
    assert data["makespan"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(output.read_text()) == data
    assert "Wrote" in done.stderr
    assert _run(diamond, "-o", str(output)).returncode == 1  # never overwrites unasked


def test_exit_codes(diamond: str, tmp_path: Path) -> None:
    least = schedule(parse_tasks(json.dumps(DIAMOND))).lower_bound_bytes
    short = _run(diamond, "-m", str(least - 1), "--json")
    assert (short.returncode, json.loads(short.stdout)["status"]) == (3, "INFEASIBLE")
    assert short.stderr.count("\n") == 1
    assert str(least) in short.stderr
    for arguments in (("-m", "banana"), ("-a", "magic"), ("-p", "0"), ("--time-limit", "-1"), (), ("-a", "liu")):
        path = diamond if arguments else str(tmp_path / "missing.json")
        bad = _run(path, *arguments)
        assert bad.returncode == 1, arguments
        assert "Traceback" not in bad.stderr


def test_spilling_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "graph.dot"
    path.write_text("digraph { a [size=6]; b [size=6]; c [size=1]; d [size=1]; e [size=1]; a -> e; b -> c -> d -> e }")
    assert _run(str(path), "-m", "12").returncode == 3
    done = _run(str(path), "-m", "8", "--spill", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0
    assert (data["status"], data["peak_bytes"] <= 8, data["io_bytes"]) == (
        "FEASIBLE",
        True,
        sum(s["bytes"] for s in data["spills"] if s["move"] == "out"),
    )
