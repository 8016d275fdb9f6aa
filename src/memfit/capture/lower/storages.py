"""Which outputs of an aten op are views of an input, and how many bytes a fresh output takes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from memfit.core.errors import Unsupported
from memfit.torch_private.tensors import is_op, schema_of

# These alias their first argument though their schema does not say so.
_UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::detach", "aten::alias"}


def viewed_argument(target: Any, output: int) -> int | None:
    """The position of the argument that output number `output` of the op is a view of, or None when it is fresh."""
    return _find_viewed(target, output) if is_op(target) else None


@functools.cache
def _find_viewed(target: Any, output: int) -> int | None:
    schema = schema_of(target)
    if schema.name in _UNDECLARED_VIEWS:
        return 0
    returns = schema.returns
    if len(returns) == 1 and returns[0].type.kind() == "ListType":
        return _viewed_by_list(schema)
    declared = returns[min(output, len(returns) - 1)].alias_info if returns else None
    if declared is None:
        return None
    if declared.is_write:
        raise Unsupported(f"{schema.name} writes into its input after functionalization: use its out-of-place form in the model.")
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and (set(info.before_set) & set(declared.before_set) or (not declared.before_set and "*" in info.after_set)):
            return position  # a list of views (split, unbind) names its argument only by the wildcard
    return None


def _viewed_by_list(schema: Any) -> int | None:
    """split, unbind and chunk return lists of views; their schema marks the argument `Tensor(a -> *)`, and nothing on the return."""
    marked = (i for i, a in enumerate(schema.arguments) if a.alias_info is not None and not a.alias_info.is_write)
    return next(marked, None)


def allocated_bytes(sample: torch.Tensor, granularity: int) -> int:
    """Bytes that the allocator hands out for a tensor of this shape and strides."""
    if sample.numel() == 0:
        return 0
    if sample.layout is not torch.strided:
        raise Unsupported(f"a {sample.layout} tensor appears in the step: memfit plans dense tensors; convert it with to_dense().")
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sample.shape, sample.stride(), strict=True))
    return round_up(extent * sample.element_size(), granularity)


CUDA_GRANULARITY = 512


def granularity_of(device: torch.device) -> int:
    """What the device's allocator rounds sizes up to."""
    return CUDA_GRANULARITY if device.type == "cuda" else 1


def round_up(num_bytes: int, granularity: int) -> int:
    return -(-num_bytes // granularity) * granularity
