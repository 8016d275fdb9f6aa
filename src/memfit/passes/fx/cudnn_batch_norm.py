"""Batch normalization by cuDNN, as eager PyTorch runs it on CUDA.

Tracing replaces batch norm by a native kernel that is slower (ResNet-50 in fp32: 17 ms of a step) and rounds otherwise.
This pass over the traced graph puts cuDNN's back wherever eager would have used it; the running statistics are copied
first, so that the op stays a function and may be run again.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from memfit.kernels.norms import CUDNN_BATCH_NORM, CUDNN_BATCH_NORM_BACKWARD
from memfit.passes.interface import Level, Numbers, Pass, in_place

aten = torch.ops.aten
_MIN_EPSILON = 1e-5


def use_cudnn_batch_norm(module: torch.fx.GraphModule) -> int:
    """Put cuDNN's batch norm into a traced graph, in place; returns how many. Leaves a norm alone unless all its readers allow it."""
    if not torch.backends.cudnn.is_available() or not torch.backends.cudnn.enabled:
        return 0
    count = 0
    for node in list(module.graph.nodes):
        if node.target is aten._native_batch_norm_legit_functional.default and _eager_would_use_cudnn(node):
            backward = _backward_of(node)
            if backward is not None:
                _replace(module.graph, node, backward)
                count += 1
    module.graph.lint()
    return count


def _eager_would_use_cudnn(node: torch.fx.Node) -> bool:
    """The conditions of ATen's dispatcher for training."""
    x, weight, bias, mean, variance, training, _, eps = node.args
    if not all(isinstance(a, torch.fx.Node) for a in (x, weight, bias, mean, variance)) or training is not True:
        return False
    sample, scale = _sample(x), _sample(weight)
    if sample.device.type != "cuda" or sample.dim() < 3 or sample.dtype is torch.bfloat16 or scale.dtype is torch.bfloat16:
        return False
    half_ok = sample.dtype is not torch.float16 or scale.dtype is torch.float32
    return half_ok and isinstance(eps, float) and eps >= _MIN_EPSILON and sample.shape[0] <= 880801


def _sample(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _backward_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The one backward op that reads this norm's saved statistics, if nobody else does."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    readers = {r for k in (1, 2) if k in items for r in items[k].users}
    if len(readers) != 1:
        return None
    (backward,) = readers
    wants_all = backward.target is aten.native_batch_norm_backward.default and backward.args[9] == [True, True, True]
    return backward if wants_all and backward.args[7] is True else None


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, backward: torch.fx.Node) -> None:
    x: Any = node.args[0]
    with graph.inserting_after(node):
        forward = graph.call_function(CUDNN_BATCH_NORM, node.args, {})
    reserve_sample = _sample(x).new_empty((0,), dtype=torch.uint8)
    forward.meta = {**node.meta, "val": (*node.meta["val"], reserve_sample)}
    node.replace_all_uses_with(forward)
    graph.erase_node(node)
    with graph.inserting_after(forward):
        reserve = graph.call_function(operator.getitem, (forward, 5), {})
    reserve.meta = {"val": reserve_sample}
    gradient, _, weight, _, _, saved_mean, saved_deviation, _, eps, _ = backward.args
    with graph.inserting_after(backward):
        args = (gradient, x, weight, saved_mean, saved_deviation, eps, reserve)
        new = graph.call_function(CUDNN_BATCH_NORM_BACKWARD, args, {})
    new.meta = dict(backward.meta)
    backward.replace_all_uses_with(new)
    graph.erase_node(backward)


CUDNN_BATCH_NORM_AS_EAGER = Pass(
    name="cudnn-batch-norm",
    where="batch norm on CUDA",
    becomes="cuDNN's, as eager PyTorch runs it",
    saves="time (and rounding as eager)",
    level=Level.FX,
    numbers=Numbers.SAME_BITS,
    run=in_place(use_cudnn_batch_norm),
)
