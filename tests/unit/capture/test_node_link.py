"""Node-link graphs: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.capture.node_link import parse_node_link
from memfit.core.errors import BadInput
from memfit.planning import plan


def _data(**changes: Any) -> dict[str, Any]:
    nodes = [{"id": name, "cost_cpu": 2, "cost_ram": 10} for name in "abc"]
    return {"nodes": nodes, "links": [{"source": "a", "target": "b"}, {"source": "a", "target": "c"}], **changes}


def test_every_node_is_computed_and_only_held_while_needed() -> None:
    """b and c are sinks: both must run, neither must stay, so two of three outputs are held at most."""
    graph, costs = parse_node_link(_data())
    found = plan(graph, costs, 20).require_plan()
    assert sorted(c.op for c in found.schedule.computes) == [0, 1, 2]
    assert found.timeline.peak_bytes == 20
    assert found.timeline.time_ns == 6


def test_the_order_of_the_file_is_made_topological() -> None:
    data = _data(links=[{"0": "c", "1": "a"}, {"0": "a", "1": "b"}])
    graph, _ = parse_node_link(data)
    assert [op.name for op in graph.ops] == ["c", "a", "b"]
    given, _ = parse_node_link(_data(graph={"order": ["a", "c", "b"]}))
    assert [op.name for op in given.ops] == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 3}, "node-link"),
        ({"nodes": [{"id": 1}]}, "cost_cpu"),
        ({"nodes": [{"cost_cpu": 1, "cost_ram": 1}]}, "id"),
        ({"nodes": [{"id": "a", "cost_cpu": -1, "cost_ram": 1}]}, "at least 0"),
        ({"nodes": [{"id": "a", "cost_cpu": 1, "cost_ram": 1}] * 2}, "share an id"),
        ({"links": [{"source": "a", "target": "z"}]}, "not there"),
        ({"links": [["a", "b"]]}, "source and target"),
        ({"links": [{"source": "a", "target": "b"}, {"source": "b", "target": "a"}]}, "cycle"),
        ({"links": None}, "list"),
    ],
)
def test_bad_files_are_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        parse_node_link(_data(**changes))
    assert "\n" not in str(caught.value)
