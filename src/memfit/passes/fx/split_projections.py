"""Packed projections apart: queries, keys and values as three matrix products, where one product of all is copied to take it apart.

    traced   x ─> mm ─> + bias ─> [.., 3, width] ─> copy to [3, .., width] ─> q, k, v
    here     x ─> addmm ─> q       x ─> addmm ─> k       x ─> addmm ─> v

So `nn.MultiheadAttention` makes them. A bias costs nothing at the end of a product, and the copy of all three is saved: a quarter of the projection's
time in ViT-L on an H200. What reads them finds the layouts that it was traced with, and each can be kept or made again by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfit.passes.fx_edit import arguments_of, drop_dead_code, find_lone_ancestor, insert
from memfit.passes.interface import Level, Numbers, Pass, in_place

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default, aten.transpose.int)
_LEAST_BYTES = 2**24  # of all parts: below, two kernels more cost as much as a copy


def split_projections(module: torch.fx.GraphModule) -> int:
    """In a traced step whose nodes have samples, in place; how many."""
    return drop_dead_code(module, sum(_take_apart(node) for node in module.graph.find_nodes(op="call_function", target=aten.clone.default)))


@dataclass(frozen=True, slots=True)
class _Product:
    """x @ weight, maybe with a vector added to every row; `node` is the product itself."""

    node: torch.fx.Node
    x: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None


def _take_apart(copy: torch.fx.Node) -> bool:
    parts, sample, moved = list(copy.users), copy.meta["val"], arguments_of(copy)[0]
    product = _product(moved)
    if product is None or sample.nbytes < _LEAST_BYTES or not all(user.target is aten.select.int and user.args[1] == 0 for user in parts):
        return False
    if not sample.is_contiguous() or not _is_columns_first(moved.meta["val"], product.node.meta["val"]):
        return False
    width = sample.shape[-1]
    for part in parts:
        begin = arguments_of(part)[2] % sample.shape[0] * width
        with copy.graph.inserting_before(copy):
            made = _columns(product, begin, begin + width)
            part.replace_all_uses_with(insert(product.node, aten.view.default, made, list(sample.shape[1:])))
    return True


def _columns(product: _Product, begin: int, end: int) -> torch.fx.Node:
    """Some columns of a product, by themselves."""
    weight = insert(product.node, aten.slice.Tensor, product.weight, 1, begin, end)
    if product.bias is None:
        return insert(product.node, aten.mm.default, product.x, weight)
    bias = insert(product.node, aten.slice.Tensor, product.bias, 0, begin, end)
    return insert(product.node, aten.addmm.default, bias, product.x, weight)


def _product(node: torch.fx.Node) -> _Product | None:
    """What it is a view of, if that is a product and nobody else reads any of it."""
    made = find_lone_ancestor(node, _VIEWS)
    if made is None or made.kwargs:
        return None
    if made.target is aten.mm.default:
        x, weight = arguments_of(made)
        return _Product(made, x, weight, None)
    if made.target is aten.addmm.default:
        bias, x, weight = arguments_of(made)
        return _Product(made, x, weight, bias) if _is_vector_for(bias, made) else None
    if made.target is not aten.add.Tensor or not all(isinstance(term, torch.fx.Node) for term in made.args):
        return None
    for term, bias in _either_way(made):
        product = find_lone_ancestor(term, _VIEWS)
        if product is not None and product.target is aten.mm.default and _is_vector_for(bias, product):
            x, weight = arguments_of(product)
            return _Product(product, x, weight, bias)
    return None


def _is_vector_for(bias: torch.fx.Node, product: torch.fx.Node) -> bool:
    vector, matrix = bias.meta["val"], product.meta["val"]
    return bool(vector.dim() == 1 and vector.shape[0] == matrix.shape[1] and vector.dtype == matrix.dtype)


def _either_way(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    a, b = arguments_of(node)
    yield a, b
    yield b, a


def _is_columns_first(moved: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether `moved[p, ..., e]` is `matrix[..., p * width + e]`: rows in their order, and columns in equal parts."""
    if moved.dim() < 2:
        return False
    num_parts, *rows, width = moved.shape
    if not matrix.is_contiguous() or num_parts * width != matrix.shape[1] or math.prod(rows) != matrix.shape[0]:
        return False
    strides = [width, *(math.prod(rows[k + 1 :]) * matrix.shape[1] for k in range(len(rows))), 1]
    return all(size == 1 or found == wanted for size, found, wanted in zip(moved.shape, moved.stride(), strides, strict=True))


SPLIT_PROJECTIONS = Pass(
    name="split-projections",
    where="packed projections of attention",
    becomes="a product each",
    saves="a copy of all of them",
    level=Level.FX,
    numbers=Numbers.ROUNDS,
    run=in_place(split_projections),
)
