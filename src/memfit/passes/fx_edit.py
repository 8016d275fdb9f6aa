"""Changing a traced step, an fx graph whose nodes have samples, in place: what the passes over it share."""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext
from typing import Any

import torch

from memfit.torch_private.trees import map_leaves


def insert(like: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call where the graph inserts, described as this node is, with a sample of its own."""
    node = like.graph.call_function(target, args, kwargs)
    given = map_leaves(lambda v: v.meta["val"] if isinstance(v, torch.fx.Node) else v, args)
    sample = like.meta["val"]
    with getattr(sample, "fake_mode", nullcontext()):
        node.meta = {**like.meta, "val": target(*given, **kwargs)}
    return node


def arguments_of(node: torch.fx.Node) -> tuple[Any, ...]:
    return node.args


def find_lone_ancestor(node: torch.fx.Node, targets: Container[Any]) -> torch.fx.Node | None:
    """The first ancestor along a chain of such calls in which each value has one reader; None where one has more."""
    while len(node.users) == 1 and node.target in targets:
        node = arguments_of(node)[0]
    return node if len(node.users) == 1 else None


def drop_dead_code(module: torch.fx.GraphModule, num_changes: int) -> int:
    """Dead code elimination after so many changes, which it returns. The module's own code is not written again: its graph is lowered, and
    nobody calls it."""
    if num_changes:
        module.graph.eliminate_dead_code()
    return num_changes
