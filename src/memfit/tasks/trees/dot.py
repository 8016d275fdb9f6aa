"""A reader for Graphviz DOT: directed edges, node attributes, defaults, subgraphs. Nothing is executed or laid out.

    digraph g { node [time=1]; a [output_bytes="4MiB"]; a -> {b c}; subgraph cluster_x { b -> d [bytes=10] } }

Enough for what tools write (Graphviz, networkx, Dask, Airflow). HTML labels are skipped; ports (`a:n`) are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.core.errors import BadInput

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*|/\*.*?\*/)
      | (?P<quoted>"(?:\\.|[^"\\])*")
      | (?P<arrow>->|--)
      | (?P<name>[A-Za-z_\u0080-\U0010ffff][\w\u0080-\U0010ffff]*|-?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?))
      | (?P<html><(?:[^<>]|<[^<>]*>)*>)
      | (?P<mark>[{}\[\];,=:])""",
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS = {"graph", "node", "edge", "digraph", "subgraph", "strict"}
Attributes = dict[str, str]


@dataclass(slots=True)
class DotGraph:
    nodes: dict[str, Attributes] = field(default_factory=dict)
    edges: list[tuple[str, str, Attributes]] = field(default_factory=list)


def parse_dot(text: str, source: str) -> DotGraph:
    """Nodes with their attributes and edges, in the order of the file. Raises BadInput with the line."""
    return _Parser(text, source).parse()


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.tokens: list[tuple[str, str, int]] = []  # kind, value, offset
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"{text[at : at + 20]!r} is not DOT", at)
            if match.lastgroup != "space":
                self.tokens.append((str(match.lastgroup), match.group(), at))
            at = match.end()
        self.at = 0
        self.graph = DotGraph()

    def parse(self) -> DotGraph:
        self._accept("strict")
        if not self._accept("digraph"):
            raise self._error("a DOT file begins with digraph (directed) here", self._offset())
        if self._peek() != "{":
            self._identifier()
        self._block({}, {})
        if self.at != len(self.tokens):
            raise self._error("text after the closing brace", self._offset())
        return self.graph

    def _block(self, node_defaults: Attributes, edge_defaults: Attributes) -> list[str]:
        """Statements between braces; returns the nodes named in them. Defaults hold until the block ends."""
        self._expect("{")
        node_defaults, edge_defaults, seen = dict(node_defaults), dict(edge_defaults), []
        while not self._accept("}"):
            if self._accept(";") or self._accept(","):
                continue
            if self._peek() in ("graph", "node", "edge") and self._kind() == "name":
                which = self._next()
                found = self._attributes()
                {"node": node_defaults, "edge": edge_defaults}.get(which, {}).update(found)
                continue
            seen += self._statement(node_defaults, edge_defaults)
        return seen

    def _statement(self, node_defaults: Attributes, edge_defaults: Attributes) -> list[str]:
        ends = [self._operand(node_defaults, edge_defaults)]
        if ends[0] and self._peek() == "=" and self.tokens[self.at - 1][0] != "mark":  # graph attribute: a = b
            self._next()
            self._identifier()
            self._forget(ends[0])
            return []
        while self._kind() == "arrow":
            if self._next() == "--":
                raise self._error("an undirected edge (--): task graphs have directed ones (->)", self._offset())
            ends.append(self._operand(node_defaults, edge_defaults))
        attributes = self._attributes()
        if len(ends) == 1:
            for name in ends[0]:
                self.graph.nodes[name].update(attributes)
        for tails, heads in pairwise(ends):
            self.graph.edges += [(a, b, {**edge_defaults, **attributes}) for a in tails for b in heads]
        return [name for group in ends for name in group]

    def _operand(self, node_defaults: Attributes, edge_defaults: Attributes) -> list[str]:
        if self._peek() == "subgraph" and self._kind() == "name":
            self._next()
            if self._peek() != "{":
                self._identifier()
        if self._peek() == "{" and self._kind() == "mark":
            return self._block(node_defaults, edge_defaults)
        name = self._identifier()
        if self._accept(":"):
            self._identifier()
            if self._accept(":"):
                self._identifier()
        self.graph.nodes.setdefault(name, dict(node_defaults))
        return [name]

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.graph.nodes.pop(name, None)

    def _attributes(self) -> Attributes:
        found: Attributes = {}
        while self._accept("["):
            while not self._accept("]"):
                if self._accept(";") or self._accept(","):
                    continue
                key = self._identifier()
                found[key] = self._identifier() if self._accept("=") else "true"
        return found

    def _identifier(self) -> str:
        kind, value = self._kind(), self._peek()
        if kind == "html":
            return self._next()
        if kind == "quoted":
            self._next()
            return value[1:-1].replace('\\"', '"').replace("\\\n", "")
        if kind != "name" or value in _KEYWORDS:
            raise self._error(f"a name is expected, not {value!r}" if value else "the file ends too early", self._offset())
        return self._next()

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise self._error(f"{mark!r} is expected", self._offset())

    def _accept(self, value: str) -> bool:
        if self._peek() == value and self._kind() in ("mark", "name"):
            self.at += 1
            return True
        return False

    def _peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def _kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _offset(self) -> int:
        return self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)

    def _next(self) -> str:
        value = self._peek()
        if not value:
            raise self._error("the file ends too early", len(self.text))
        self.at += 1
        return value

    def _error(self, what: str, offset: int) -> BadInput:
        line = self.text.count("\n", 0, offset) + 1
        return BadInput(f"{self.source}, line {line}: {what}.")
