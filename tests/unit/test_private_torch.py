"""Reads src/ and fails on a name private to torch outside `compilers/` and `torch_private/`, and on Inductor outside `compilers/inductor/`.

Private is what torch may change without a word: a name with a leading underscore, and everything below `torch.fx.experimental`. Names of ops
(`torch.ops.aten._foo`) are public. An attribute with a leading underscore counts as torch's unless memfit itself defines one of that name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "memfit"
FILES = sorted(ROOT.rglob("*.py"))
OUR_OWN = ("compilers/", "torch_private/")
EXPERIMENTAL = "torch.fx.experimental"
STANDARD = frozenset({"_fields", "_getframe"})  # of Python itself


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_private_path(path: str) -> bool:
    return path.split(".")[0] == "torch" and (any(map(is_private, path.split("."))) or path.startswith(EXPERIMENTAL))


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names with a leading underscore that this file defines: functions, classes, fields, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Names in this file that stand for torch or something inside it."""
    found = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"})
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node.targets[0], node.value):
                path = _path(value, found)
                if path:
                    found[target] = path
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, its)


def _path(node: ast.expr, aliases: dict[str, str]) -> str:
    """The dotted path inside torch that an expression names; empty where it names nothing of torch's."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        inner = _path(node.value, aliases)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def private_symbols(source: str, ours: frozenset[str]) -> list[str]:
    """What in this text is private to torch, each with its line."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({(node.lineno, a.name): None for a in node.names if is_private_path(a.name)})
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{a.name}" for a in node.names]
            found.update({(node.lineno, path): None for path in paths if is_private_path(path)})
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_self(node.value):
            path = _path(node, aliases)
            if path.startswith("torch.ops.") or (not path and node.attr in ours):
                continue
            found[node.lineno, path or f"….{node.attr}"] = None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value) and name.value not in ours:
                found[node.lineno, f"….{name.value}"] = None
    return [f"line {line}: {name}" for line, name in sorted(found)]


OURS = STANDARD | {name for path in FILES for name in own_names(ast.parse(path.read_text())) if is_private(name)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_torch_stay_behind_their_doors(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    if not relative.startswith(OUR_OWN):
        found = private_symbols(path.read_text(), OURS) if "torch" in path.read_text() else []
        assert not found, f"{relative} uses what is private to torch; give memfit.torch_private a function for the need:\n" + "\n".join(
            found
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_inductor_stays_behind_its_adapter(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    if not relative.startswith("compilers/inductor/"):
        assert "torch._inductor" not in path.read_text(), f"{relative} names torch._inductor; it belongs in compilers/inductor/"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree as p", "torch.utils._pytree"),
        ("from torch.fx.experimental.proxy_tensor import make_fx", "torch.fx.experimental.proxy_tensor.make_fx"),
        ("import torch\nf = torch._C._storage_Use_Count", "torch._C"),
        ("import torch\ncuda = torch.cuda\ncuda._sleep(1)", "torch.cuda._sleep"),
        ("def f(t):\n    return t.untyped_storage()._cdata", "…._cdata"),
        ("def f(t):\n    return getattr(t, '_version')", "…._version"),
    ],
)
def test_a_private_name_is_seen(source: str, name: str) -> None:
    assert any(found.endswith(f": {name}") for found in private_symbols(source, frozenset()))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\naten = torch.ops.aten\nf = aten._log_softmax.default",
        "class A:\n    def f(self):\n        return self._x.__dict__",
        "from torch.utils.flop_counter import flop_registry",
    ],
)
def test_what_is_public_or_ours_is_not(source: str) -> None:
    assert private_symbols(source, frozenset()) == []
