"""`memfit report`: what it says is what the judge saw, and the page stands alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.small import op

import memfit
from memfit.cli import main
from memfit.core.graph import Kind

Run = Callable[..., tuple[int, str, str]]
EVIL = "<script>alert('x')</script>"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["memfit", "report", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """x -> a -> b -> c, then c and a meet: a is dropped and made again. Names come from a hostile stranger."""
    monkeypatch.chdir(tmp_path)
    sizes = (10, 40, 30, 20, 10)
    storages = tuple(
        memfit.Storage(id=i, size_bytes=s, kind=Kind.INPUT if i == 0 else Kind.ACTIVATION, name=EVIL if i == 1 else f"s{i}")
        for i, s in enumerate(sizes)
    )
    ops = (op(0, (0,), (1,)), op(1, (1,), (2,)), op(2, (2,), (3,)), op(3, (3, 1), (4,)))
    tensors = tuple(memfit.Tensor(id=i, storage=i) for i in range(5))
    graph = memfit.Graph(ops=ops, tensors=tensors, storages=storages, sources=(0,), results=(0, 4))
    C, F = memfit.Compute, memfit.Free
    schedule = memfit.Schedule(steps=(C(0), C(1), F(1), C(2), F(2), C(0), C(3), F(1), F(3)))
    costs = memfit.Costs(op_time_ns=(1000, 10, 10, 10), workspace_bytes=(0, 0, 0, 0), graph_digest=graph.digest)
    timeline = memfit.simulate(graph, schedule, costs)
    plan = memfit.Plan(schedule=schedule, timeline=timeline, planner="by hand", graph_digest=graph.digest, budget=memfit.Budget.parse(90))
    memfit.save(graph, "g.json")
    memfit.save(costs, "c.json")
    memfit.save(plan, "p.json")
    return tmp_path


def test_text_and_json(run: Run, files: Path) -> None:
    code, out, err = run("p.json", "g.json", "--costs", "c.json", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert (data["peak_bytes"], data["keep_all_peak_bytes"], data["budget_bytes"], data["inside"]) == (80, 100, 90, True)
    assert sum(data["bytes_by_kind_at_peak"].values()) == data["peak_bytes"]
    assert data["recomputed"] == [{"name": "f0", "where": "", "extra_runs": 1, "extra_time_ns": 1000}]
    assert data["overhead_fraction"] == pytest.approx(1000 / 1030)
    code, out, _ = run("p.json", "g.json", "--costs", "c.json")
    assert code == 0
    assert "recomputed, dearest first:" in out
    assert "5 computes of 4 ops" in out


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_and_picture(run: Run, files: Path) -> None:
    code, _, err = run("p.json", "g.json", "--costs", "c.json", "--html", "r.html", "--png", "r.png")
    assert code == 0, err
    assert "Wrote r.html" in err
    assert Path("r.png").read_bytes().startswith(b"\x89PNG")
    page = _Page()
    page.feed(Path("r.html").read_text())
    assert page.ids == ["facts", "kinds", "largest", "recomputed"]
    assert [link.split(",")[0] for link in page.links] == ["data:image/png;base64"]  # nothing is fetched from anywhere
    assert "script" not in page.tags
    assert EVIL in page.text  # shown, not run
    assert run("p.json", "g.json", "--html", "r.html")[0] == 1  # not overwritten


def test_wrong_files_are_refused(run: Run, files: Path) -> None:
    storages = (memfit.Storage(id=0, size_bytes=1),)
    memfit.save(
        memfit.Graph(ops=(), tensors=(memfit.Tensor(id=0, storage=0),), storages=storages, sources=(0,), results=(0,)), "other.json"
    )
    code, _, err = run("p.json", "other.json")
    assert (code, "belongs to graph" in err) == (1, True)
    code, _, err = run("g.json", "g.json")
    assert (code, "holds a graph, but a plan is expected" in err) == (1, True)
    assert run("missing.json", "g.json")[0] == 1
