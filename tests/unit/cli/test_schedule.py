"""`memfit schedule` as a user runs it: data on stdout, errors in one line, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.tasks import judge_order, parse_tasks, schedule

DIAMOND = {
    "tasks": [{"id": name, "output_bytes": size, "memory_bytes": 1, "time": 2} for name, size in zip("abcd", (4, 10, 3, 1), strict=True)],
    "edges": [["a", "b"], ["a", "c"], ["b", "d"], ["c", "d"]],
}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["memfit", "schedule", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def diamond(tmp_path: Path) -> str:
    path = tmp_path / "diamond.json"
    path.write_text(json.dumps(DIAMOND))
    return str(path)


def test_json_holds_what_was_promised(run: Run, diamond: str) -> None:
    done = run(diamond, "--processors", "1", "--memory", "8GiB", "--algorithm", "auto", "--json")
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


def test_processors_give_start_times_and_a_picture(run: Run, diamond: str, tmp_path: Path) -> None:
    picture, output = tmp_path / "gantt.png", tmp_path / "plan.json"
    done = run(diamond, "-p", "2", "-m", "1kB", "--json", "--png", str(picture), "-o", str(output))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert dict(zip(data["order"], data["start_times"], strict=True)) == {"a": 0, "b": 2, "c": 2, "d": 4}
    assert data["makespan"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(output.read_text()) == data
    assert "Wrote" in done.stderr
    assert run(diamond, "-o", str(output)).returncode == 1  # never overwrites unasked


def test_exit_codes(run: Run, diamond: str, tmp_path: Path) -> None:
    least = schedule(parse_tasks(json.dumps(DIAMOND))).lower_bound_bytes
    short = run(diamond, "-m", str(least - 1), "--json")
    assert (short.returncode, json.loads(short.stdout)["status"]) == (3, "INFEASIBLE")
    assert short.stderr.count("\n") == 1
    assert str(least) in short.stderr
    for arguments in (("-m", "banana"), ("-a", "magic"), ("-p", "0"), ("--time-limit", "-1"), (), ("-a", "liu")):
        path = diamond if arguments else str(tmp_path / "missing.json")
        bad = run(path, *arguments)
        assert bad.returncode == 1, arguments
        assert "Traceback" not in bad.stderr


def test_spilling_is_printed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "graph.dot"
    path.write_text("digraph { a [size=6]; b [size=6]; c [size=4]; d [size=4]; e [size=1]; a -> c -> e; b -> d -> e }")
    assert run(str(path), "-m", "12").returncode == 3
    done = run(str(path), "-m", "11", "--spill", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0
    assert (data["status"], data["peak_bytes"] <= 11, data["io_bytes"]) == (
        "FEASIBLE",
        True,
        sum(s["bytes"] for s in data["spills"] if s["move"] == "out"),
    )


def test_help_names_every_algorithm(run: Run) -> None:
    from memfit.tasks import ALGORITHMS

    text = " ".join(run("--help").stdout.split()).replace("- ", "-")
    assert all(name in text for name in ALGORITHMS)
