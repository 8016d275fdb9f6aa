"""Files in four formats, and files that are none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.core import BadInput
from memfit.tasks import parse_tasks, read_tasks, schedule

OURS = {
    "tasks": [
        {"id": "a", "output_bytes": 10, "memory_bytes": 1, "time": 2},
        {"id": "b", "output_bytes": "1KiB", "time": 1.5},
        {"id": 3, "output_bytes": 5},
    ],
    "edges": [["a", 3], ["b", 3, 7]],
}
DOT = """
strict digraph "my graph" {
  rankdir=LR; label = "sizes"; node [time=2, shape=box]  # defaults
  a [output_bytes="10", label=<<b>x</b>>]; "b c" [size="1KiB"];
  a:n -> {d "b c"} -> e [bytes=4]
  subgraph cluster_0 { node [time=7]; label=x; f [size=3]; f -> e }  // cluster
  /* a comment; */ d [size=5 memory=2]; e [size=1, time=.5]
}
"""


def test_our_json_keeps_ids_and_units() -> None:
    graph = parse_tasks(json.dumps(OURS))
    assert list(graph.names) == ["a", "b", 3]
    assert graph.output_bytes.tolist() == [10, 1024 + 7, 5]
    assert graph.time.tolist() == [2.0, 1.5, 1.0]
    assert graph.edges.tolist() == [[0, 2], [1, 2]]


def test_dot_groups_defaults_subgraphs_and_comments() -> None:
    graph = parse_tasks(DOT)
    assert list(graph.names) == ["a", "b c", "d", "e", "f"]
    named = {(graph.names[a], graph.names[b]) for a, b in graph.edges.tolist()}
    assert named == {("a", "d"), ("a", "b c"), ("d", "e"), ("b c", "e"), ("f", "e")}
    assert graph.time.tolist() == [2.0, 2.0, 2.0, 0.5, 7.0]
    assert graph.memory_bytes.tolist() == [0, 0, 2, 0, 0]
    assert int(graph.item_bytes.sum()) == 10 + 1024 + 5 + 1 + 3 + 4 * 4


def test_networkx_writes_what_we_read() -> None:
    networkx = pytest.importorskip("networkx")
    nodes = networkx.DiGraph()
    nodes.add_node("x", output_bytes=4, time=2)
    nodes.add_node(7, output_bytes=8)
    nodes.add_edge("x", 7, bytes=3)
    for key in ("links", "edges"):
        graph = parse_tasks(json.dumps(networkx.node_link_data(nodes, edges=key)))
        assert list(graph.names) == ["x", 7]
        assert graph.output_bytes.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "begins with digraph"),
        ("{", "not valid JSON"),
        ("[1, 2]", 'no "tasks"'),
        ("{}", 'no "tasks"'),
        ('{"tasks": 3}', "list of objects"),
        ('{"tasks": [{"id": 1}]}', "output_bytes is missing"),
        ('{"tasks": [{"output_bytes": 1}]}', "id None"),
        ('{"tasks": [{"id": 1, "output_bytes": -4}]}', "negative"),
        ('{"tasks": [{"id": 1, "output_bytes": "banana"}]}', "cannot be read"),
        ('{"tasks": [{"id": 1, "output_bytes": 1.5}]}', "whole number"),
        ('{"tasks": [{"id": 1, "output_bytes": 1, "memory_byte": 2}]}', "unknown field 'memory_byte'"),
        ('{"tasks": [{"id": 1, "output_bytes": 1, "time": "x"}]}', "time of task 1"),
        ('{"tasks": [{"id": 1, "output_bytes": 1, "time": -1}]}', "time of task 1"),
        ('{"tasks": [{"id": 1, "output_bytes": 1}, {"id": 1, "output_bytes": 1}]}', "two tasks"),
        ('{"tasks": [{"id": 1, "output_bytes": 1}], "edges": [[1, 2]]}', "names task '2'"),
        ('{"tasks": [{"id": 1, "output_bytes": 1}], "edges": [[1]]}', "list of \\[from, to\\]"),
        ('{"tasks": [{"id": 1, "output_bytes": 1}], "edges": [[1, 1]]}', "itself"),
        ('{"nodes": [{"id": 1}], "links": []}', "nothing to plan"),
        ('{"nodes": [{"id": 1, "size": 2}], "links": [], "directed": false}', "undirected"),
        ("digraph { a -- b }", "undirected"),
        ("digraph { a [size=1", "ends too early"),
        ("digraph { a -> }", "line 1"),
        ("graph { a }", "begins with digraph"),
        ("digraph { a [size=1] } x", "after the closing"),
        ("digraph { a [size=1]; \n\n ~ }", "line 3"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, cause: str) -> None:
    with pytest.raises(BadInput, match=cause) as refused:
        parse_tasks(text, "file")
    assert "\n" not in str(refused.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("\ufeff" + json.dumps(OURS), encoding="utf-8")
    assert schedule(read_tasks(path)).order == (0, 1, 2)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="UTF-8"):
        read_tasks(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_tasks(tmp_path / "missing.json")
