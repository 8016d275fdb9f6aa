"""The `bash` blocks of the how-to pages run, line by line, on small files of the names that the pages use."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memfit
from memfit import Compute, Costs, Graph, Op, Schedule, Storage, Tensor
from memfit.cli import main

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"


def write_graph() -> None:
    graph = Graph(
        ops=tuple(Op(id=i, name=f"f{i}", inputs=(i,), outputs=(i + 1,)) for i in range(4)),
        tensors=tuple(Tensor(id=i, storage=i) for i in range(5)),
        storages=tuple(Storage(id=i, size_bytes=2**20) for i in range(5)),
        sources=(0,),
        results=(4,),
    )
    memfit.save(graph, "graph.json")
    memfit.save(Costs(op_time_ns=(10,) * 4, workspace_bytes=(0,) * 4, graph_digest=graph.digest), "costs.json")


def write_judged() -> None:
    write_graph()
    memfit.save(Schedule(steps=tuple(Compute(op=i) for i in range(4))), "schedule.json")
    memfit.save(memfit.plan(memfit.load("graph.json", Graph)).require_plan(), "plan.json")  # type: ignore[arg-type]


def write_planned() -> None:
    write_graph()
    nodes = [{"id": i, "cost_cpu": 1, "cost_ram": size} for i, size in enumerate((100, 50, 150, 150, 50, 50, 20))]
    links = [{"source": i, "target": i + 1} for i in range(6)] + [{"source": 0, "target": 6}]  # node 0 waits, or is computed again
    Path("fcn8_b32.json").write_text(json.dumps({"directed": True, "nodes": nodes, "links": links}))


def write_buffers() -> None:
    Path("buffers.csv").write_text("id,lower,upper,size\nx,0,3,8\ny,2,6,8\nz,4,7,4\n")


def write_tasks() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", (HOW_TO / "schedule-a-task-graph.md").read_text(), re.DOTALL)
    Path("graph.json").write_text(block)
    tasks = [{"id": name, "output_bytes": 4096} for name in "abc"]
    Path("tree.json").write_text(json.dumps({"tasks": tasks, "edges": [["a", "c"], ["b", "c"]]}))
    Path("graph.dot").write_text('digraph { a [output_bytes="4MiB"]; a -> {b c}; b -> d; c -> d }')


PAGES: dict[str, tuple[Callable[[], None], int]] = {
    "checkpoint-a-chain": (lambda: None, 5),
    "judge-a-schedule": (write_judged, 5),
    "pack-buffers": (write_buffers, 3),
    "plan-a-graph": (write_planned, 2),
    "schedule-a-task-graph": (write_tasks, 5),
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_files, num_commands = PAGES[page]
    write_files()
    blocks = re.findall(r"```bash\n(.*?)```", (HOW_TO / f"{page}.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) == num_commands
    for line in lines:
        command = shlex.split(line, comments=True)
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert not stopped.value.code, f"{line}: {printed.err}"
        assert "status" in printed.out or "peak" in printed.out, line
        if "--json" in command:
            assert "status" in json.loads(printed.out)
        for option in ("-o", "--png"):
            assert option not in command or Path(command[command.index(option) + 1]).stat().st_size > 0, line
