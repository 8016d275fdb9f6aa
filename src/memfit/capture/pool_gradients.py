"""Max pooling's gradient by gathering: each place of the input looks at the windows it lies in, instead of being added to by them.

    traced:    full(0) ─> scatter_add <─ positions, gradient        a buffer of the input's size, zeroed and added to, then read
    gathered:  max_pool2d_with_indices_backward(gradient, positions)     worked out where it is read, in registers

Inductor traces the first, which reads less where many windows overlap, and has code for the second. In a region with a normalisation's
backward the buffer is as large as the activation beside it. Which is faster depends on the windows: both are offered, and measured.
Before torch 2.12 it traces the second, given the pool's input, which it then writes out though nothing but its size is read.

Windows that overlap and begin at the border (3 wide, 2 apart, no padding) are left as they are traced. In double precision on a GPU they
are scattered by us: gathered inside a reduction they come out wrong on an H200 (torch 2.11, Triton 3.6), in torch.compile as well, though
the same code is right in single precision, and in double when Triton interprets it.
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_POSITIONS = "prims._low_memory_max_pool_offsets_to_indices"
GATHERS, SCATTERS = aten.max_pool2d_with_indices_backward.default, aten.scatter_add.default
_COPIES = (aten.view.default, aten.reshape.default, aten.clone.default)
ELEMENTWISE = (*_COPIES, torch.ops.prims.convert_element_type.default)  # what a mask may come before or after


def scatters(target: Any) -> bool:
    """Whether an op may be such a gradient."""
    return target in (SCATTERS, GATHERS)


def gathered(module: torch.fx.GraphModule, *, only_apart: bool = False) -> int:
    """Replace them in a graph whose nodes have samples, in place; how many. `only_apart`: where windows do not overlap, so that each place
    looks at one: less to read and write than in any other way."""
    asked = [node for node in module.graph.find_nodes(op="call_function", target=GATHERS) if forget_input(node)]
    found = asked + [n for n in module.graph.find_nodes(op="call_function", target=SCATTERS) if _replace(n, only_apart)]
    return cleaned(module, len(found))


def scattered(module: torch.fx.GraphModule, *, always: bool = False) -> int:
    """Those that are traced as gathered and would come out wrong, in place; how many. (`always`: whatever the type and the device.)"""
    nodes = module.graph.find_nodes(op="call_function", target=GATHERS)
    found = [n for n in nodes if not _is_trusted(*arguments_of(n)[2:5]) and (always or _is_double_on_a_gpu(n.meta["val"]))]
    for node in found:
        _scatter(node)
    return cleaned(module, len(found))


def cleaned(module: torch.fx.GraphModule, num_changes: int) -> int:
    """After so many changes, which it returns: without the nodes that nobody reads any more."""
    if num_changes:
        module.graph.eliminate_dead_code()
        module.recompile()
    return num_changes


def _is_double_on_a_gpu(sample: torch.Tensor) -> bool:
    return sample.dtype is torch.float64 and sample.device.type == "cuda"


def _scatter(node: torch.fx.Node) -> None:
    """Added to by windows, plane by plane."""
    change, positions, sample = node.args[0], node.args[-1], node.meta["val"]
    *outer, height, width = sample.shape
    planes = math.prod(outer)
    with node.graph.inserting_before(node):
        zeros = insert(node, aten.full.default, [planes, height * width], 0, dtype=sample.dtype, device=sample.device)
        dense = [insert(node, aten.clone.default, x, memory_format=torch.contiguous_format) for x in (positions, change)]
        places, values = (insert(node, aten.view.default, x, [planes, -1]) for x in dense)
        added = insert(node, SCATTERS, zeros, 1, places, values)
        whole = insert(node, aten.view.default, added, list(sample.shape))
        laid = _laid_like(whole, sample)
    node.replace_all_uses_with(laid)


def _laid_like(node: torch.fx.Node, sample: torch.Tensor) -> torch.fx.Node:
    """Where the graph inserts: a copy to channels last of a value that was so and would come planar. A compiler writes nothing for it."""
    planar = sample.is_contiguous() or not sample.is_contiguous(memory_format=torch.channels_last)
    return node if planar else insert(node, aten.clone.default, node, memory_format=torch.channels_last)


def insert(like: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call where the graph inserts, described as this node is, with a sample of its own."""
    node = like.graph.call_function(target, args, kwargs)
    given = tree_map(lambda v: v.meta["val"] if isinstance(v, torch.fx.Node) else v, args)
    sample = like.meta["val"]
    with getattr(sample, "fake_mode", nullcontext()):
        node.meta = {**like.meta, "val": target(*given, **kwargs)}
    return node


def _is_trusted(kernel: list[int], stride: list[int], padding: list[int]) -> bool:
    """Whether the first window that a place lies in is found without rounding down what is negative."""
    each = zip(kernel, stride or kernel, padding, strict=True)
    return all(window - step <= pad or step == 1 for window, step, pad in each)


def forget_input(node: torch.fx.Node) -> bool:
    """Of a gradient that is gathered already: its input by zeros; its layout was the input's."""
    change, given, *rest = arguments_of(node)
    if given.target is aten.full.default or not _is_trusted(*rest[:3]):
        return False
    sample = given.meta["val"]
    with node.graph.inserting_before(node):
        like = node.graph.call_function(aten.full.default, (list(sample.shape), 0), {"dtype": sample.dtype, "device": sample.device})
    like.meta["val"] = sample
    node.args = (change, like, *rest)
    with node.graph.inserting_after(node):
        laid = _laid_like(node, node.meta["val"])
    if laid is not node:
        node.replace_all_uses_with(laid, delete_user_cb=lambda user: user is not laid)
    return True


def _replace(node: torch.fx.Node, only_apart: bool) -> bool:
    zeros, dim, places, values = arguments_of(node)
    positions, change = _before_copies(places), _before_copies(values)
    if zeros.target is not aten.full.default or zeros.args[1] != 0 or dim != 1 or not _is_positions(positions):
        return False
    _, kernel, plane, stride, padding, dilation = arguments_of(positions)
    if not _is_trusted(kernel, stride, padding):
        return False
    if only_apart and any(window > step for window, step in zip(kernel, stride, strict=True)):
        return False
    shape, readers = change.meta["val"].shape, list(node.users)
    sizes = [*shape[:2], *plane]
    sized = all(user.target is aten.view.default and list(arguments_of(user)[1]) == sizes for user in readers)
    if not readers or not sized or len(shape) != 4 or shape != positions.meta["val"].shape:
        return False
    with node.graph.inserting_before(readers[0]):
        like = node.graph.call_function(aten.full.default, (sizes, 0), dict(zeros.kwargs))  # of its input only the size is read
        is_ceiled = [*shape[2:]] != _floored(plane, kernel, stride, padding, dilation)
        arguments = (change, like, kernel, stride, padding, dilation, is_ceiled, positions)
        made = node.graph.call_function(GATHERS, arguments)
    like.meta["val"] = made.meta["val"] = readers[0].meta["val"]
    for user in readers:
        user.replace_all_uses_with(made)
    return True


@dataclass(frozen=True, slots=True)
class PooledBy:
    """Where a pool's gradient comes from: the pool itself, the gradient of what it gave, and the node that reads that first."""

    pool: torch.fx.Node
    change: torch.fx.Node
    reader: torch.fx.Node


def pool_of(node: torch.fx.Node) -> PooledBy | None:
    """Of an op that may be a pool's gradient, in either form; None if it is not, or if a copy that it reads has other readers."""
    arguments = arguments_of(node)
    places, values = (arguments[-1], arguments[0]) if node.target is GATHERS else arguments[2:]
    positions = _before_copies(places)
    if not _is_positions(positions):
        return None
    offsets, reader = arguments_of(positions)[0], node
    while values.target in ELEMENTWISE:
        if len(values.users) > 1:
            return None
        reader, values = values, values.args[0]
    return PooledBy(offsets.args[0], values, reader) if offsets.target is operator.getitem else None


def _floored(plane: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    """Sizes after a pool that leaves out windows beyond the border."""
    each = zip(plane, kernel, stride, padding, dilation, strict=True)
    return [(size + 2 * pad - spread * (window - 1) - 1) // step + 1 for size, window, step, pad, spread in each]


def arguments_of(node: torch.fx.Node) -> tuple[Any, ...]:
    return node.args


def _is_positions(node: torch.fx.Node) -> bool:
    return str(getattr(node.target, "overloadpacket", "")) == _POSITIONS


def _before_copies(node: Any) -> torch.fx.Node:
    """The value whose elements, in order, it holds: views to other sizes and copies in other layouts do not change that."""
    while node.target in _COPIES:
        node = node.args[0]
    found: torch.fx.Node = node
    return found
