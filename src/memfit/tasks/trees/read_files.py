"""Task graphs from files: our JSON, DOT, networkx node-link JSON, and captured training steps (memfit.graph).

    {"tasks": [{"id": "a", "output_bytes": 4096, "memory_bytes": 0, "time": 1.5}, ...],
     "edges": [["a", "b"], ["a", "c", 1024], ...]}

An edge's third entry is bytes that only its reader reads. Sizes may be texts such as "4MiB". The format is found from the
content, not from the file's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.io import loads, read_text
from memfit.core.units import parse_bytes
from memfit.tasks.graph import MAX_TOTAL_BYTES, TaskGraph, TaskId, task_graph
from memfit.tasks.trees.dot import parse_dot
from memfit.tasks.trees.from_training_graph import from_training_graph

_ALIASES = {
    "output_bytes": ("output_bytes", "size_bytes", "size"),
    "memory_bytes": ("memory_bytes", "workspace_bytes", "memory"),
    "time": ("time", "duration"),
}
_EDGE_BYTES = ("bytes", "size_bytes", "size")
_TASK_FIELDS = {"id", "output_bytes", "memory_bytes", "time", "name", "label"}


def read_tasks(path: str | Path) -> TaskGraph:
    """The task graph in a file. Raises BadInput with one line for anything that is not one."""
    source, content = str(path), read_text(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{source}: not UTF-8 text: a JSON or DOT file is expected.") from None
    return parse_tasks(text, source)


def parse_tasks(text: str, source: str = "input") -> TaskGraph:
    if not text.lstrip().startswith(("{", "[")):
        return _read_dot(text, source)
    data = _parse_json(text, source)
    if isinstance(data, dict) and data.get("format") == "memfit.graph":
        graph = loads(text, Graph, source=source)
        assert isinstance(graph, Graph)
        return from_training_graph(graph)
    if isinstance(data, dict) and "tasks" in data:
        return _read_our_json(data, source)
    if isinstance(data, dict) and "nodes" in data:
        return _read_node_link(data, source)
    raise BadInput(f'{source}: no "tasks" (our JSON), no "nodes" (networkx node-link) and no "format": "memfit.graph" in it.')


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise BadInput(f"{source}: nested too deeply to be a task graph.") from None
    except ValueError as error:
        raise BadInput(f"{source}: not valid JSON ({str(error)[:120]}).") from None


def _read_our_json(data: Mapping[str, Any], source: str) -> TaskGraph:
    unknown = set(data) - {"tasks", "edges", "format", "version", "name"}
    if unknown:
        raise BadInput(f"{source}: unknown field {sorted(unknown)[0]!r}: tasks and edges are expected.")
    tasks = _rows(data["tasks"], f"{source}: tasks")
    for k, task in enumerate(tasks):
        extra = set(task) - _TASK_FIELDS
        if extra:
            raise BadInput(f"{source}: tasks[{k}]: unknown field {sorted(extra)[0]!r}; known are {', '.join(sorted(_TASK_FIELDS))}.")
        if "output_bytes" not in task:
            raise BadInput(f"{source}: tasks[{k}]: output_bytes is missing: how many bytes does it leave?")
    edges = data.get("edges", [])
    if not isinstance(edges, list) or not all(isinstance(e, list) and len(e) in (2, 3) for e in edges):
        raise BadInput(f"{source}: edges: a list of [from, to] or [from, to, bytes] is expected.")
    triples = [(e[0], e[1], e[2] if len(e) == 3 else 0) for e in edges]
    return _build(((task.get("id"), task) for task in tasks), triples, source)


def _read_node_link(data: Mapping[str, Any], source: str) -> TaskGraph:
    """networkx.node_link_data: nodes with an id, links (edges from 3.4 on) with source and target."""
    if data.get("directed") is False:
        raise BadInput(f"{source}: an undirected graph: task graphs need a direction (networkx.DiGraph).")
    links = data.get("links", data.get("edges", []))
    triples = []
    for k, row in enumerate(_rows(links, f"{source}: links")):
        if "source" not in row or "target" not in row:
            raise BadInput(f"{source}: links[{k}]: source and target are expected.")
        triples.append((row["source"], row["target"], next((row[name] for name in _EDGE_BYTES if name in row), 0)))
    nodes = _rows(data["nodes"], f"{source}: nodes")
    _check_sizes(nodes, [t[2] for t in triples], source)
    return _build(((node.get("id"), node) for node in nodes), triples, source)


def _read_dot(text: str, source: str) -> TaskGraph:
    graph = parse_dot(text, source)
    triples = [(a, b, next((attributes[k] for k in _EDGE_BYTES if k in attributes), 0)) for a, b, attributes in graph.edges]
    _check_sizes(list(graph.nodes.values()), [t[2] for t in triples], source)
    return _build(graph.nodes.items(), triples, source)


def _check_sizes(nodes: list[Any], edge_bytes: list[Any], source: str) -> None:
    """A graph without any size would schedule nothing: say which attribute is looked for."""
    if nodes and not any(edge_bytes) and not any(name in node for node in nodes for name in _ALIASES["output_bytes"]):
        names = ", ".join(_ALIASES["output_bytes"])
        raise BadInput(f"{source}: no node has a size ({names}) and no edge has bytes: without sizes there is nothing to plan.")


def _rows(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise BadInput(f"{where}: a list of objects is expected.")
    return value


def _build(tasks: Iterable[tuple[Any, Mapping[str, Any]]], triples: list[tuple[Any, Any, Any]], source: str) -> TaskGraph:
    names: list[TaskId] = []
    columns: dict[str, list[float]] = {name: [] for name in _ALIASES}
    position: dict[TaskId, int] = {}
    for name, fields in tasks:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise BadInput(f"{source}: a task has the id {name!r}: a text or a whole number is expected.")
        if name in position:
            raise BadInput(f"{source}: two tasks have the id {name!r}: ids must differ.")
        position[name] = len(names)
        names.append(name)
        for column, aliases in _ALIASES.items():
            value = next((fields[a] for a in aliases if a in fields), None)
            columns[column].append(_time(value, name, source) if column == "time" else _size(value, source, column, name))
    edges = [(_find(position, a, source), _find(position, b, source)) for a, b, _ in triples]
    own = [_size(size, source, "bytes on an edge", b) for _, b, size in triples]
    return task_graph(
        names=names,
        output_bytes=[int(x) for x in columns["output_bytes"]],
        memory_bytes=[int(x) for x in columns["memory_bytes"]],
        time=columns["time"],
        edges=edges,
        edge_bytes=own if any(own) else None,
    )


def _find(position: dict[TaskId, int], name: Any, source: str) -> int:
    if isinstance(name, (str, int)) and name in position:
        return position[name]
    raise BadInput(f"{source}: an edge names task {str(name)[:60]!r}, which is not among the {len(position)} tasks.")


def _size(value: Any, source: str, what: str, name: Any) -> int:
    if type(value) is int and 0 <= value < MAX_TOTAL_BYTES:  # the usual case, a million times
        return value
    return 0 if value is None else parse_bytes(value, what=f"{source}: {what} of task {name!r}")


def _time(value: Any, name: TaskId, source: str) -> float:
    if value is None:
        return 1.0
    if type(value) is int and 0 <= value < MAX_TOTAL_BYTES:
        return float(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1e300:
        raise BadInput(f"{source}: time of task {name!r} is {str(value)[:40]!r}: a number of at least 0 is expected.")
    return number
