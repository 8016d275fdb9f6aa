"""What Inductor is told about memory: which values it writes out, what a max pool's gradient is, and in which layout a sum lies.

Between library calls a step is bound by how often kernels pass over activations. docs/explanation/compiled-engine.md says what each of these saves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.compilers.inductor import private
from memfit.kernels.custom_ops import POOL_GRADIENT
from memfit.torch_private.patch import Patch, patch_torch

aten = torch.ops.aten
_CONVOLVED = {4: (torch.contiguous_format, torch.channels_last), 5: (torch.contiguous_format, torch.channels_last_3d)}
_NOTHING_WRITTEN_OUT = {"realize_reads_threshold": 100, "realize_acc_reads_threshold": 100, "realize_opcount_threshold": 1000}
_FEW_TO_LOOK_AT = 9  # three wide, one apart
_MADE_AGAIN = 2  # activations that a value is made of: twice read they are four passes, written out and read back five
_BROADCAST = 8  # times smaller: comes from the cache
_MANY = 100
_FEW_WINDOWS = 2.25  # three wide, two apart


# -- what is written out -------------------------------------------------------------------------------------------------


def choose_thresholds(module: torch.fx.GraphModule) -> dict[str, int]:
    """Inductor's settings for a region: gradients of max pools, if all are of few windows, are better made again than written out."""
    nodes = module.graph.find_nodes(op="call_function", target=POOL_GRADIENT)
    few = all(math.prod(map(_num_windows, *node.args[2:4])) <= _FEW_TO_LOOK_AT for node in nodes)
    return _NOTHING_WRITTEN_OUT if nodes and few else {}


def count_wide_reads() -> list[Patch]:
    """Inductor writes out a value that is read in several places if it is made of many. It counts a channel's mean as much as an activation,
    so a normalised value made again for a mask is written and read back: four ninths of what such a backward moves. Here only what is
    about as large as the value itself counts, if that is little."""
    box_class = private.storage_box()
    count = box_class.num_reads
    return [Patch(box_class, "num_reads", lambda box: wide if (wide := _num_wide_reads(box)) <= _MADE_AGAIN else count(box))]


def _num_wide_reads(box: Any) -> int:
    """How many buffers about as large as itself a value that is not written out is made of; many, if that cannot be known."""
    made = getattr(box, "data", None)
    if not isinstance(made, (private.pointwise(), private.reduction())):
        return _MANY
    try:
        read_for = math.prod(int(n) for n in (*made.get_size(), *made.get_reduction_size()))
        return sum(_BROADCAST * int(private.virtual().graph.get_numel(name)) > read_for for name in made.inner_fn_opcount().read_buffers)
    except (AttributeError, KeyError, TypeError, ValueError):  # sizes that are not numbers, another Inductor
        return _MANY


def inline_pools() -> list[Patch]:
    """Inductor writes out what a max pool reads, lest windows that overlap compute it several times. That is a buffer of the pool's input, and two
    passes over it: for nothing where windows do not overlap, and for little where each place lies in few and is made of one activation."""
    pool, box_class = private.lower_max_pool(), private.storage_box()
    leave_unwritten = Patch(box_class, "realize_hint", lambda _: None)

    def lower(x: Any, kernel_size: Any, stride: Any, padding: Any, *rest: Any, **more: Any) -> Any:
        overlaps = [k / s for k, s in zip(kernel_size, stride, strict=True)]
        apart = all(share <= 1 for share in overlaps) and not any(padding)
        inline = apart or (math.prod(overlaps) <= _FEW_WINDOWS and _num_wide_reads(getattr(x, "data", None)) <= 1)
        with patch_torch("fuse max pools with what they read", *([leave_unwritten] if inline else [])):
            return pool(x, kernel_size, stride, padding, *rest, **more)

    return [] if pool is None else [Patch(lowering(), "_max_pool_with_offsets", lower)]


# -- gradients of max pools ----------------------------------------------------------------------------------------------


@functools.cache
def lowering() -> Any:
    """Inductor's module of that name, which then also knows the ops of `kernels.custom_ops`."""
    module = private.lowering()
    module.register_lowering(POOL_GRADIENT, type_promotion_kind=None)(_pool_gradient)
    return module


def _pool_gradient(change: Any, offsets: Any, kernel: Any, stride: Any, padding: Any, plane: Any) -> Any:
    """`kernels.custom_ops`: a place adds up the gradients of those windows in which it was the largest, from the last around it backwards."""
    ops = private.ops()
    if change.get_dtype() is torch.float64 and change.get_device().type == "cuda":  # such code came out wrong there (torch 2.11, H200)
        return lowering().fallback_handler(POOL_GRADIENT, add_to_fallback_set=False)(change, offsets, kernel, stride, padding, plane)
    if math.prod(map(_num_windows, kernel, stride)) > 1:
        change.realize_hint()
    read, largest = change.make_loader(), offsets.make_loader()
    *outer, rows, columns = (int(n) for n in change.get_size())
    down, across = (_Windows(*numbers) for numbers in zip((rows, columns), kernel, stride, padding, plane, strict=True))

    def gradient(index: Any) -> Any:
        *others, row, column = index
        total = zero = ops.constant(0.0, torch.promote_types(change.get_dtype(), torch.float32))
        for (i, di, i_holds), (j, dj, j_holds) in itertools.product(down.around(row), across.around(column)):

            def part(place: Any = (*others, i, j), within: Any = di * kernel[1] + dj) -> Any:
                is_here = ops.eq(ops.to_dtype(largest(place), torch.int32), ops.index_expr(within, torch.int32))
                return ops.where(is_here, read(place), zero)

            holds = [*i_holds, *j_holds]
            total = ops.add(total, ops.masked(functools.reduce(ops.and_, holds), part, 0.0) if holds else part())
        return total

    return private.pointwise().create(device=change.get_device(), dtype=change.get_dtype(), inner_fn=gradient, ranges=[*outer, *plane])


def _num_windows(width: int, step: int) -> int:
    """In how many a place may lie."""
    return -(-width // step)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Of a pool, in one dimension: so many, so wide, so far apart, the first so far before the first place."""

    count: int
    width: int
    step: int
    pad: int
    size: int

    def around(self, place: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Numbers of windows that a place may lie in, where in them it lies, and what must hold for that, if it does not always."""
        ops = private.ops()
        for back in range(_num_windows(self.width, self.step)):
            number = private.floor_div()(place + self.pad, self.step) - back
            within = private.modular_indexing()(place + self.pad, 1, self.step) + back * self.step
            holds = []
            if self.pad // self.step < back:
                holds.append(ops.ge(ops.index_expr(number, torch.int32), ops.constant(0, torch.int32)))
            if (self.size - 1 + self.pad) // self.step - back >= self.count:
                holds.append(ops.lt(ops.index_expr(number, torch.int32), ops.constant(self.count, torch.int32)))
            if (back + 1) * self.step > self.width:
                holds.append(ops.lt(ops.index_expr(within, torch.int32), ops.constant(self.width, torch.int32)))
            yield number, within, holds


# -- layouts -------------------------------------------------------------------------------------------------------------


def add_contiguous_first(rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """Of two terms in different layouts the first decides that of their sum: the contiguous one. A transformer's stream of activations that
    lies as some attention left it is read in one order and written in another, and a norm of it takes two kernels instead of one."""

    def add(a: Any, b: Any, **scaled: Any) -> Any:
        if scaled.get("alpha", 1) == 1 and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _is_laid_by_a_view(a, b):
            return aten.add.Tensor(b, a)
        return NotImplemented if rule is None else rule(a, b, **scaled)

    return add


def _is_laid_by_a_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b is contiguous and a is not, unless that is how convolutions want it."""
    if a.shape != b.shape or a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return b.is_contiguous() and not any(a.is_contiguous(memory_format=f) for f in _CONVOLVED.get(a.dim(), (torch.contiguous_format,)))
