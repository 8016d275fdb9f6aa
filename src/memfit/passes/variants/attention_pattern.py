"""Finds attention that a model writes out itself: two products of batches of matrices with a softmax between, and their gradients.

    q, k' ─ bmm ─> scores ─ scale, mask ─> softmax ─> weights ─ bmm with v ─> out          forward
    dq, dk' <─ bmm, bmm <─ scale <─ softmax' <─ bmm with v' <─ gradient ─> bmm with weights' ─> dv     backward

Between the named ops there may be reshapes that keep the order of elements, and casts. The search starts at a softmax and gives
up at the first thing it does not know: a weight that drops out, a mask that could cover a whole row with a finite number, a scale in
backward other than that in forward. What it finds is exactly the gradient of attention, because every arrow has been followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfit.capture.captured import OpCall, Ref
from memfit.core.graph import Op
from memfit.passes.rewriter import Rewriter

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.clone.default)  # dropout of nothing is a clone
_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Tensors of one attention over batches of matrices: queries (n, l, d), keys transposed (n, d, s), values (n, s, d).

    `masks` are (tensor, sign): 0 for one that is added, 1 for one that is True where nothing may be seen, -1 for the opposite.
    """

    query: int
    keys: int
    value: int
    out: int
    gradient: int
    of_query: int
    of_keys: int
    of_value: int
    scale: float
    masks: tuple[tuple[int, int], ...]
    examples: int  # n is examples x heads
    forward: int  # the op that makes `out`
    backward: int  # the first op that makes a gradient


@dataclass(slots=True)
class _Scores:
    """What lies between the first product and the softmax."""

    product: Op
    scale: float
    masks: tuple[tuple[int, int], ...]


def find_attention(rewriter: Rewriter, softmax: Op) -> Attention | None:
    """The attention around one softmax, or None."""
    return _Finder(rewriter).around(softmax)


class _Finder:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph, self.calls = rewriter, rewriter.graph, rewriter.captured.calls

    def around(self, softmax: Op) -> Attention | None:
        call = self.calls[softmax.id]
        weights = softmax.outputs[0]
        shape = self.rewriter.sample(weights).shape
        if call.args[1] not in (-1, len(shape) - 1) or len(shape) < 3:
            return None
        scores = self._scores(call.args[0].tensor)
        if scores is None:
            return None
        out = _only(op for op in self._products(weights) if self._is(self._argument(op, 0), weights, transposed=False))
        of_value = _only(op for op in self._products(weights) if self._is(self._argument(op, 0), weights, transposed=True))
        change = _only(op for op in self._readers(weights) if self.calls[op.id].target is aten._softmax_backward_data.default)
        if out is None or of_value is None or change is None:
            return None
        value, gradient = self._argument(out, 1), self._argument(of_value, 1)
        if not self._is_change_of(change, gradient, value):
            return None
        return self._with_gradients(scores, change, out, of_value, shape[0])

    def _with_gradients(self, scores: _Scores, change: Op, out: Op, of_value: Op, examples: int) -> Attention | None:
        query, keys = self._argument(scores.product, 0), self._argument(scores.product, 1)
        end, scale = self._unscaled(change.outputs[0], scores.masks)
        products = self._products(end)
        of_query = _only(
            op for op in products if self._is(self._argument(op, 0), end) and self._is(self._argument(op, 1), keys, transposed=True)
        )
        of_keys = _only(
            op for op in products if self._is(self._argument(op, 1), end) and self._is(self._argument(op, 0), query, transposed=True)
        )
        if of_query is None or of_keys is None or not math.isclose(scale, scores.scale, rel_tol=1e-6):
            return None
        return Attention(
            query=query,
            keys=keys,
            value=self._argument(out, 1),
            out=out.outputs[0],
            gradient=self._argument(of_value, 1),
            of_query=of_query.outputs[0],
            of_keys=of_keys.outputs[0],
            of_value=of_value.outputs[0],
            scale=scores.scale,
            masks=scores.masks,
            examples=examples,
            forward=out.id,
            backward=min(of_query.id, of_keys.id, of_value.id),
        )

    # -- towards the first product -------------------------------------------------------------------------------------

    def _scores(self, tensor: int) -> _Scores | None:
        """Back from the softmax's input: masks, then scales, then the product."""
        scale = 1.0
        masks: list[tuple[int, int]] = []
        while (maker := self._maker(tensor)) is not None:
            call = self.calls[maker.id]
            if call.target is aten.bmm.default:
                return _Scores(product=maker, scale=scale, masks=tuple(masks))
            factor, mask = _factor(call), self._mask(call)
            if call.target in _CASTS and _is_float(self.rewriter.sample(maker.outputs[0])):
                tensor = call.args[0].tensor
            elif factor is not None:
                tensor, scale = call.args[0].tensor, scale * factor
            elif mask is not None and scale == 1.0:
                tensor = mask[0]
                masks.append(mask[1:])
            else:
                return None
        return None

    def _mask(self, call: OpCall) -> tuple[int, int, int] | None:
        """(scores, mask, sign) of an op that adds a mask or puts minus infinity; the mask is the one of fewer elements."""
        if call.target is aten.add.Tensor and not call.kwargs and all(isinstance(a, Ref) for a in call.args):
            large, small = sorted((a.tensor for a in call.args), key=lambda t: -self.rewriter.sample(t).numel())
            return (large, small, 0) if self.rewriter.sample(small).dim() else None
        if call.target is aten.masked_fill.Scalar and call.args[2] == -math.inf:
            return call.args[0].tensor, call.args[1].tensor, 1
        if call.target is aten.where.self and isinstance(call.args[2], Ref) and self._number(call.args[2].tensor) == -math.inf:
            return call.args[1].tensor, call.args[0].tensor, -1
        return None

    def _number(self, tensor: int) -> float | None:
        maker = self.rewriter.maker_of(tensor)
        call = None if maker is None else self.calls[maker.id]
        if call is None or self.rewriter.sample(tensor).dim():
            return None
        place = 0 if call.target is aten.scalar_tensor.default else 1
        return float(call.args[place]) if call.target in (aten.scalar_tensor.default, aten.full.default) else None

    # -- backward --------------------------------------------------------------------------------------------------------

    def _is_change_of(self, change: Op, gradient: int, value: int) -> bool:
        """Whether softmax's backward starts from gradient x transposed values."""
        maker = self._maker(self.calls[change.id].args[0].tensor)
        if maker is not None and self.calls[maker.id].target in _CASTS:
            maker = self._maker(self.calls[maker.id].args[0].tensor)
        if maker is None or self.calls[maker.id].target is not aten.bmm.default:
            return False
        return self._is(self._argument(maker, 0), gradient) and self._is(self._argument(maker, 1), value, transposed=True)

    def _unscaled(self, tensor: int, masks: tuple[tuple[int, int], ...]) -> tuple[int, float]:
        """Forward from softmax's backward through scales, casts and zeros where a mask was: (what the products read, scale)."""
        scale = 1.0
        while True:
            steps = [op for op in self._readers(tensor) if self._is_step(self.calls[op.id], masks)]
            if len(steps) != 1:
                return tensor, scale
            scale *= _factor(self.calls[steps[0].id]) or 1.0
            tensor = steps[0].outputs[0]

    def _is_step(self, call: OpCall, masks: tuple[tuple[int, int], ...]) -> bool:
        if call.target is aten.masked_fill.Scalar:
            return call.args[2] == 0 and (self._mask_of(call.args[1]), 1) in self._known(masks)
        if call.target is aten.where.self:
            kept_first = isinstance(call.args[2], Ref) and self._number(call.args[2].tensor) == 0
            return kept_first and (self._mask_of(call.args[0]), -1) in self._known(masks)
        return call.target in _CASTS or _factor(call) is not None

    def _mask_of(self, mask: Ref) -> int:
        return self.graph.storage_of(mask.tensor)

    def _known(self, masks: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        return [(self.graph.storage_of(t), sign) for t, sign in masks]

    # -- following arrows ------------------------------------------------------------------------------------------------

    def _argument(self, op: Op, position: int) -> int:
        tensor: int = self.calls[op.id].args[position].tensor
        return tensor

    def _maker(self, tensor: int) -> Op | None:
        """The op that made a tensor, if what is read is all of it in its own order."""
        maker = self.rewriter.maker_of(tensor)
        return maker if maker is not None and maker.outputs and self._is(tensor, maker.outputs[0]) else None

    def _readers(self, tensor: int) -> list[Op]:
        """Ops that read a tensor or a reshape of it."""
        same = [t for t in self.graph.tensors_of[self.graph.storage_of(tensor)] if self._is(t, tensor)]
        found = sorted({r for t in same for r in self.graph.readers[t]})
        return [op for op in (self.graph.ops[r] for r in found) if not all(self.graph.is_view(op, t) for t in op.outputs)]

    def _products(self, tensor: int) -> list[Op]:
        """Batches of matrix products that read a tensor in any of its views, or a cast of it."""
        storages = [self.graph.storage_of(tensor)]
        storages += [self.graph.storage_of(op.outputs[0]) for op in self._readers(tensor) if self.calls[op.id].target in _CASTS]
        found = sorted({r for s in storages for t in self.graph.tensors_of[s] for r in self.graph.readers[t]})
        return [self.graph.ops[r] for r in found if self.calls[r].target is aten.bmm.default]

    def _is(self, tensor: int, other: int, *, transposed: bool = False) -> bool:
        """Whether two tensors are the same elements in the same order, through views and casts; or matrices transposed."""
        a, b = self.rewriter.sample(tensor), self.rewriter.sample(other)
        if self.graph.storage_of(tensor) != self.graph.storage_of(other) and not self._is_cast(tensor, other):
            return False
        if transposed:
            b = b.reshape(-1, *b.shape[-2:]).transpose(-2, -1) if b.is_contiguous() else b.transpose(-2, -1)
            return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
        same = a.shape == b.shape and a.stride() == b.stride()
        dense = a.is_contiguous() and b.is_contiguous() and a.numel() == b.numel()
        return (same or dense) and a.storage_offset() == b.storage_offset()

    def _is_cast(self, tensor: int, other: int) -> bool:
        maker = self.rewriter.maker_of(tensor)
        if maker is None or self.calls[maker.id].target not in _CASTS:
            return False
        source = self.calls[maker.id].args[0].tensor
        return self.graph.storage_of(source) == self.graph.storage_of(other) and self._is(source, other)


def _factor(call: OpCall) -> float | None:
    """The number an op multiplies by, if it does."""
    if call.target not in _SCALES or len(call.args) != 2 or isinstance(call.args[1], Ref) or not isinstance(call.args[0], Ref):
        return None
    number = float(call.args[1])
    if call.target in (aten.div.Tensor, aten.div.Scalar):
        return 1 / number if number else None
    return number or None


def _is_float(sample: torch.Tensor) -> bool:
    return sample.dtype.is_floating_point


def _only(ops: Iterator[Op]) -> Op | None:
    found = list(ops)
    return found[0] if len(found) == 1 else None
