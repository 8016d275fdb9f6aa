"""Changing a traced step, an fx graph whose nodes have samples, in place: what the passes over it share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map


def insert(like: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call where the graph inserts, described as this node is, with a sample of its own."""
    node = like.graph.call_function(target, args, kwargs)
    given = tree_map(lambda v: v.meta["val"] if isinstance(v, torch.fx.Node) else v, args)
    sample = like.meta["val"]
    with getattr(sample, "fake_mode", nullcontext()):
        node.meta = {**like.meta, "val": target(*given, **kwargs)}
    return node


def arguments_of(node: torch.fx.Node) -> tuple[Any, ...]:
    return node.args


def cleaned(module: torch.fx.GraphModule, num_changes: int) -> int:
    """After so many changes, which it returns: without the nodes that nobody reads any more."""
    if num_changes:
        module.graph.eliminate_dead_code()
        module.recompile()
    return num_changes
