"""Max pooling's gradient as one op: each place of the input looks at the windows it lies in, instead of being added to by them.

    traced         full(0) ─> scatter_add <─ positions <─ offsets          a buffer of the input's size, zeroed and added to, then read
    before 2.12    max_pool2d_with_indices_backward(d p, x, positions)     looked up, but x is written out for its size, and positions have 64 bits
    here           memfit.max_pool_gradient(d p, offsets)                  elementwise in what the pool left: worked out where it is read

A pool's offset says in 8 bits which place of its window was the largest. A place knows where it lies in each window around it, so it compares
two small numbers; what PyTorch traces first makes places of the whole plane of them. In double precision on a GPU the op runs as PyTorch has
it, by adding up: looked up inside a reduction, gradients of windows that overlap at the border came out wrong there, in torch.compile as well.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.custom_ops import POOL_GRADIENT
from memfit.passes.fx_edit import arguments_of, drop_dead_code, insert
from memfit.passes.interface import Level, Numbers, Pass, in_place

aten = torch.ops.aten
_POSITIONS = "prims._low_memory_max_pool_offsets_to_indices"
_LOOKS, _SCATTERS = aten.max_pool2d_with_indices_backward.default, aten.scatter_add.default
_COPIES = (aten.view.default, aten.reshape.default, aten.clone.default)
_CONVERT = torch.ops.prims.convert_element_type.default
ELEMENTWISE = (*_COPIES, _CONVERT)  # what a mask may come before or after


def gather_pool_gradients(module: torch.fx.GraphModule) -> int:
    """Put it in the place of what was traced, in a graph whose nodes have samples; how often."""
    nodes = [node for target in (_LOOKS, _SCATTERS) for node in module.graph.find_nodes(op="call_function", target=target)]
    return drop_dead_code(module, sum((_looks if node.target is _LOOKS else _scatters)(node) for node in nodes))


def _looks(node: torch.fx.Node) -> bool:
    """max_pool2d_with_indices_backward(change, input, ..., positions)."""
    arguments = arguments_of(node)
    return _replace(node, [node], arguments[0], _before_copies(arguments[-1]))


def _scatters(node: torch.fx.Node) -> bool:
    """scatter_add(zeros, 1, positions, change), viewed as planes by all that read it."""
    zeros, dim, places, values = arguments_of(node)
    positions, change = _before_copies(places), _before_copies(values)
    if zeros.target is not aten.full.default or zeros.args[1] != 0 or dim != 1 or not _is_positions(positions):
        return False
    readers, sizes = list(node.users), [*positions.meta["val"].shape[:-2], *arguments_of(positions)[2]]
    if not readers or not all(user.target is aten.view.default and list(arguments_of(user)[1]) == sizes for user in readers):
        return False
    if change.target is _CONVERT:  # 16-bit gradients are added up in 32
        with node.graph.inserting_before(node):
            change = insert(change, _CONVERT, _before_copies(change.args[0]), node.meta["val"].dtype)
    return _replace(node, readers, change, positions)


def _replace(node: torch.fx.Node, readers: list[torch.fx.Node], change: torch.fx.Node, positions: torch.fx.Node) -> bool:
    if not _is_positions(positions) or change.meta["val"].shape != positions.meta["val"].shape:
        return False
    offsets, kernel, plane, stride, padding, dilation = arguments_of(positions)
    if len(plane) != 2 or any(spread != 1 for spread in dilation):
        return False
    with node.graph.inserting_before(readers[0]):
        made = node.graph.call_function(POOL_GRADIENT, (change, offsets, [*kernel], [*(stride or kernel)], [*padding], [*plane]))
    made.meta = dict(readers[0].meta)
    for reader in readers:
        reader.replace_all_uses_with(made)
    return True


@dataclass(frozen=True, slots=True)
class PooledBy:
    """Where a pool's gradient comes from: the pool itself, the gradient of what it gave, and the node that reads that first."""

    pool: torch.fx.Node
    change: torch.fx.Node
    reader: torch.fx.Node


def pool_of(node: torch.fx.Node) -> PooledBy | None:
    """Of a pool's gradient; None if a copy that it reads has other readers."""
    (values, offsets, *_), reader = arguments_of(node), node
    while values.target in ELEMENTWISE:
        if len(values.users) > 1:
            return None
        reader, values = values, values.args[0]
    return PooledBy(offsets.args[0], values, reader) if offsets.target is operator.getitem else None


def _is_positions(node: torch.fx.Node) -> bool:
    return str(getattr(node.target, "overloadpacket", "")) == _POSITIONS


def _before_copies(node: Any) -> torch.fx.Node:
    """The value whose elements, in order, it holds: views to other sizes and copies in other layouts do not change that."""
    while node.target in _COPIES:
        node = node.args[0]
    found: torch.fx.Node = node
    return found


POOL_GRADIENT_GATHERED = Pass(
    name="max-pool-gradient",
    where="max pooling's gradient",
    becomes="looked up from 8-bit offsets where it is read",
    saves="indices, a zeroed buffer, the pool's input",
    level=Level.FX,
    numbers=Numbers.ROUNDS,
    run=in_place(gather_pool_gradients),
)
