"""Node-link JSON (networkx) of rematerialization benchmarks becomes a Graph with Costs.

    {"nodes": [{"id": 0, "cost_cpu": 12, "cost_ram": 4096}, ...], "links": [{"source": 0, "target": 1}, ...]}

A node is an op with one output: resident from the start of its op until freed, no workspace. Every node must be computed
at least once: a node nobody reads also makes a token of zero bytes that the step must return, so that no plan leaves it
out while its bytes may still go. Nodes run in the order the file gives (`graph.order` where it has one, else the order
of its nodes made topological, earliest listed first).
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor
from memfit.core.io import read_text

_TIMES, _SIZES = ("cost_cpu", "duration"), ("cost_ram", "out_cost")
_LINKS = (("source", "target"), ("0", "1"))


def is_node_link(data: Any) -> bool:
    return isinstance(data, dict) and isinstance(data.get("nodes"), list) and ("links" in data or "edges" in data)


def load_node_link(path: str | Path) -> tuple[Graph, Costs]:
    """Read a file; BadInput in one line for anything that is not such a graph."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON ({str(error)[:80]}).") from None
    return parse_node_link(data, source=str(path))


def parse_node_link(data: Any, *, source: str = "input") -> tuple[Graph, Costs]:
    if not is_node_link(data):
        raise BadInput(f'{source}: not a node-link graph: a JSON object with "nodes" and "links" is expected.')
    nodes = [_node(item, i, source) for i, item in enumerate(data["nodes"])]
    number = {name: i for i, (name, _, _, _) in enumerate(nodes)}
    if len(number) != len(nodes):
        raise BadInput(f"{source}: two nodes share an id: ids must differ.")
    links = data.get("links", data.get("edges"))
    if not isinstance(links, list):
        raise BadInput(f'{source}: "links" should be a list, not {type(links).__name__}.')
    readers_of: list[list[int]] = [[] for _ in nodes]
    inputs_of: list[list[int]] = [[] for _ in nodes]
    for item in links:
        a, b = _link(item, number, source)
        if b not in readers_of[a]:
            readers_of[a].append(b)
            inputs_of[b].append(a)
    order = _order(data, number, readers_of, inputs_of, source)
    return _graph(nodes, inputs_of, readers_of, order)


def _node(item: Any, position: int, source: str) -> tuple[Any, int, int, str]:
    where = f"{source}: node {position}"
    if not isinstance(item, dict):
        raise BadInput(f"{where} should be an object, not {type(item).__name__}.")
    name = item.get("id", item.get("name"))
    if not isinstance(name, (int, str)):
        raise BadInput(f'{where} has no "id".')
    return name, _amount(item, _TIMES, where), _amount(item, _SIZES, where), str(item.get("name", name))[:200]


def _amount(item: dict[str, Any], keys: tuple[str, ...], where: str) -> int:
    for key in keys:
        if key in item:
            value = item[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**62:
                raise BadInput(f"{where}: {key} should be a number of at least 0, not {str(value)[:40]!r}.")
            return round(value)
    raise BadInput(f"{where} has neither {' nor '.join(keys)}.")


def _link(item: Any, number: dict[Any, int], source: str) -> tuple[int, int]:
    for tail, head in _LINKS:
        if isinstance(item, dict) and tail in item and head in item:
            ends = (item[tail], item[head])
            for end in ends:
                if not isinstance(end, (int, str)) or end not in number:
                    raise BadInput(f"{source}: a link names node {str(end)[:40]!r}, which is not there.")
            return number[ends[0]], number[ends[1]]
    raise BadInput(f"{source}: a link should have source and target, not {str(item)[:60]!r}.")


def _order(data: Any, number: dict[Any, int], readers: list[list[int]], inputs: list[list[int]], source: str) -> list[int]:
    attributes = data.get("graph")
    given = attributes.get("order") if isinstance(attributes, dict) else None
    if isinstance(given, list) and sorted(map(str, given)) == sorted(map(str, number)):
        order = [number[x] for x in given]
        place = {v: i for i, v in enumerate(order)}
        if all(place[a] < place[v] for v in order for a in inputs[v]):
            return order
    waiting = [len(x) for x in inputs]
    ready = [v for v in range(len(inputs)) if not waiting[v]]
    order = []
    while ready:
        v = heapq.heappop(ready)
        order.append(v)
        for w in readers[v]:
            waiting[w] -= 1
            if not waiting[w]:
                heapq.heappush(ready, w)
    if len(order) != len(inputs):
        raise BadInput(f"{source}: the graph has a cycle through {len(inputs) - len(order)} of its {len(inputs)} nodes.")
    return order


def _graph(
    nodes: list[tuple[Any, int, int, str]], inputs: list[list[int]], readers: list[list[int]], order: list[int]
) -> tuple[Graph, Costs]:
    place = {v: i for i, v in enumerate(order)}
    storages = [Storage(id=i, size_bytes=nodes[v][2], kind=Kind.ACTIVATION, name=nodes[v][3]) for i, v in enumerate(order)]
    tokens: dict[int, int] = {}
    for v in order:
        if not readers[v]:
            tokens[v] = len(storages)
            storages.append(Storage(id=len(storages), size_bytes=0, kind=Kind.TEMPORARY, name=f"{nodes[v][3]} done"))
    ops = [
        Op(
            id=i,
            name=nodes[v][3],
            inputs=tuple(sorted(place[a] for a in inputs[v])),
            outputs=(i, tokens[v]) if v in tokens else (i,),
        )
        for i, v in enumerate(order)
    ]
    graph = Graph(
        ops=tuple(ops),
        tensors=tuple(Tensor(id=s.id, storage=s.id, name=s.name) for s in storages),
        storages=tuple(storages),
        sources=(),
        results=tuple(tokens.values()),
    )
    costs = Costs(
        op_time_ns=tuple(nodes[v][1] for v in order),
        workspace_bytes=(0,) * len(order),
        variant_time_ns=((),) * len(order),
        variant_workspace_bytes=((),) * len(order),
        device="file",
        graph_digest=graph.digest,
    )
    return graph, costs
