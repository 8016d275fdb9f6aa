"""A ReLU before a max pool: its gradient is masked where the pool's is small, before it is spread over the pool's input.

    traced:  d p ─> pool' ─> where(y <= 0, 0, ·)      reads y, the ReLU's output, which nothing else in backward needs
    here:    d p ─> where(p <= 0, 0, ·) ─> pool'      reads p, the pooled values: a quarter of y, and the next layer's input anyway

Every place that a window's gradient goes to held the window's largest value, so y there is p: the same bits come out. Without it a
network like VGG keeps the output of every last convolution before a pool, or computes it again, for its sign alone.

Left as they are: ReLUs behind anything but a convolution, since backward of a normalisation reads its input anyway and has the sign for
nothing; and other readers beside the pool, since a skip's gradient is added before the mask.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from memfit.kernels.custom_ops import POOL_GRADIENT
from memfit.passes.fx.max_pool_gradient import ELEMENTWISE, PooledBy, pool_of
from memfit.passes.fx_edit import arguments_of, drop_dead_code, find_lone_ancestor, insert
from memfit.passes.interface import Level, Numbers, Pass, in_place

aten = torch.ops.aten


def mask_before_pools(module: torch.fx.GraphModule) -> int:
    """Move masks in a traced step whose nodes have samples, in place; how many."""
    return drop_dead_code(module, sum(_move(node) for node in module.graph.find_nodes(op="call_function", target=aten.where.self)))


def _move(mask: torch.fx.Node) -> bool:
    """Of `where(y <= 0, 0, gradient of y)`."""
    is_off, zero, gradient = arguments_of(mask)
    if not (_is(is_off, aten.le.Scalar) and is_off.args[1] == 0 and _is_zero(zero)):
        return False
    activated, spread = arguments_of(is_off)[0], find_lone_ancestor(gradient, ELEMENTWISE)
    pooled_by = None if spread is None or spread.target is not POOL_GRADIENT else pool_of(spread)
    if spread is None or pooled_by is None or arguments_of(pooled_by.pool)[0] is not activated:
        return False
    pooled = next((user for user in pooled_by.pool.users if user.target is operator.getitem and user.args[1] == 0), None)
    if pooled is None or _bytes(pooled) >= _bytes(activated) or not _is_made_for_it(activated):
        return False
    _insert(pooled, pooled_by, mask)
    mask.replace_all_uses_with(arguments_of(mask)[2])
    return True


def _insert(pooled: torch.fx.Node, pooled_by: PooledBy, like: torch.fx.Node) -> None:
    change, reader = pooled_by.change, pooled_by.reader
    sample = change.meta["val"]
    with like.graph.inserting_before(reader):
        is_off = insert(like, aten.le.Scalar, pooled, 0)
        zero = insert(like, aten.full.default, [], 0.0, dtype=sample.dtype, device=sample.device)
        masked = insert(like, aten.where.self, is_off, zero, change)
    reader.replace_input_with(change, masked)


def _is_made_for_it(activated: torch.fx.Node) -> bool:
    """Whether this is a ReLU, and its input a convolution's result, bias added or not, that nobody else reads."""
    if not _is(activated, aten.relu.default):
        return False
    before = arguments_of(activated)[0]
    made_of = [before]
    if _is(before, aten.add.Tensor):
        made_of += [a for a in before.args if isinstance(a, torch.fx.Node) and _bytes(a) == _bytes(activated)]
    return all(len(node.users) == 1 for node in made_of) and _is(made_of[-1], aten.convolution.default)


def _bytes(node: torch.fx.Node) -> int:
    sample = node.meta["val"]
    return int(sample.numel() * sample.element_size())


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target


def _is_zero(node: Any) -> bool:
    return _is(node, aten.full.default) and node.args[1] == 0


RELU_BEFORE_POOL = Pass(
    name="relu-before-pool",
    where="ReLU before a max pool",
    becomes="masked by the pooled values",
    saves="the ReLU's output",
    level=Level.FX,
    numbers=Numbers.SAME_BITS,
    run=in_place(mask_before_pools),
)
