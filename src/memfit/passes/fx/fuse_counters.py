"""Counters together: every batch norm counts its batches, in an op of its own.

traced   n1 ─> + 1       n2 ─> + 1       n3 ─> + 1          a kernel for eight bytes, for each layer
here     n1, n2, n3 ─> each + 1                             one for all
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch

from memfit.passes.fx_edit import arguments_of, drop_dead_code, insert
from memfit.passes.interface import Level, Numbers, Pass, in_place

aten = torch.ops.aten


def fuse_counters(module: torch.fx.GraphModule) -> int:
    """In a traced step whose nodes have samples, in place; how many counters."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.fx.Node]] = defaultdict(list)
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _counts(node):
            sample = node.meta["val"]
            alike[sample.dtype, sample.device].append(node)
    return drop_dead_code(module, sum(_put_together(nodes) for nodes in alike.values() if len(nodes) > 1))


def _counts(node: torch.fx.Node) -> bool:
    counter, *by = arguments_of(node)
    given = isinstance(counter, torch.fx.Node) and counter.op == "placeholder"
    return given and by == [1] and not node.kwargs and node.meta["val"].dim() == 0 and counter.meta["val"].dtype == node.meta["val"].dtype


def _put_together(nodes: list[torch.fx.Node]) -> int:
    first = nodes[0]
    with first.graph.inserting_before(first):
        every = insert(first, aten._foreach_add.Scalar, [arguments_of(node)[0] for node in nodes], 1)
        for number, node in enumerate(nodes):
            node.replace_all_uses_with(insert(node, operator.getitem, every, number))
    return len(nodes)


FUSE_COUNTERS = Pass(
    name="fuse-counters",
    where="batch norms' counters",
    becomes="one kernel for all",
    saves="launches",
    level=Level.FX,
    numbers=Numbers.SAME_BITS,
    run=in_place(fuse_counters),
)
