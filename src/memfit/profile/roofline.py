"""Costs without the device: an op takes the longer of its arithmetic and its memory traffic, plus a launch.

Good to a factor of two on single ops, much better on their ratios, which is what planning needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.costs import Costs, Level
from memfit.core.graph import Variant
from memfit.profile.devices import Device, device
from memfit.torch_private.trees import map_leaves

_SLICED = {"convolution_in_slices": torch.ops.aten.convolution, "convolution_backward_in_slices": torch.ops.aten.convolution_backward}
_BY_ALGORITHM = ("convolution_by", "convolution_backward_by")
_CHUNKED = {"chunked_loss": (12, 16), "chunked_loss_backward": (28, 34)}
"""Bytes written and read for each logit, in 32 bits and in 16: product, cast, softmax, scaling, cast back, two more products."""

_FUSED_ATTENTION = {"fused_attention": 4, "fused_attention_backward": 10}
"""Operations for each score and each number of a head's width: two products of a multiplication and an addition, or five."""

_ATTENTION_BYTES = 40
"""Bytes written and read for each score of attention by slices: product, scale, softmax, product, its change in two passes, casts."""


def roofline(captured: Captured, name: str) -> Costs:
    """Costs on the named device of the table."""
    target = device(name)
    graph = captured.graph
    times = tuple(_time_ns(captured, i, target) for i in range(len(graph.ops)))
    return Costs(
        op_time_ns=times,
        workspace_bytes=with_fixed_workspace(captured, [_workspace(captured, captured.calls[i]) for i in range(len(graph.ops))]),
        variant_time_ns=tuple(
            tuple(times[op.id] + _extra_ns(captured, v, captured.call(op.id, k), target) for k, v in enumerate(op.variants, 1))
            for op in graph.ops
        ),
        variant_workspace_bytes=tuple(tuple(_workspace(captured, c) for c in calls) for calls in captured.variant_calls),
        levels=(
            Level(
                write_bytes_per_s=target.link_bytes_per_s,
                read_bytes_per_s=target.link_bytes_per_s,
                write_latency_ns=10_000,
                read_latency_ns=10_000,
            ),
        ),
        device=target.name,
        graph_digest=graph.digest,
    )


def _extra_ns(captured: Captured, variant: Variant, call: OpCall, target: Device) -> int:
    """Slices are more launches of smaller kernels; other variants do the same work over fewer or as many bytes."""
    if _own_name(call) == "attention_backward_in_slices":  # what a fused kernel keeps on the chip goes through memory
        passes = _ATTENTION_BYTES * _num_scores(captured, call) / target.memory_bytes_per_s
        return 12 * _num_chunks(call) * target.launch_ns + round(passes * 1e9)
    return 8 * target.launch_ns if "slices" in variant.name else 0


def _workspace(captured: Captured, call: OpCall) -> int:
    """Temporaries of our own implementations, by what they allocate; aten's are taken as none."""
    if (inside := getattr(call.target, "inside", None)) is not None:
        return int(inside.slice_bytes)
    name = getattr(getattr(call.target, "func", call.target), "__name__", "")
    if name in _BY_ALGORITHM:
        return int(call.target.args[0].workspace_bytes)  # type: ignore[union-attr]
    if name in ("pack_positive", "pack_bits", "threshold_backward_from_bits", "dropout_backward_from_bits"):
        largest = max((_numel(captured, r) for r in call.args if isinstance(r, Ref)), default=0)
        return 2 * largest
    if name in ("chunked_loss", "chunked_loss_backward"):
        hidden, weight = call.args[:2] if name == "chunked_loss" else call.args[1:3]
        samples = captured.samples[hidden.tensor], captured.samples[weight.tensor]
        assert samples[0] is not None
        assert samples[1] is not None
        num_chunks: int = getattr(call.target, "args", (1,))[0]
        rows = -(-samples[0].shape[0] // num_chunks)
        whole = 4 * samples[1].numel() if name == "chunked_loss_backward" else 0
        return int(rows * samples[1].shape[1] * 12 + whole)
    if name == "attention_backward_in_slices":  # four matrices of a slice, and the sums for keys and values
        return -(-16 * _num_scores(captured, call) // _num_chunks(call)) + 8 * _numel(captured, call.args[2])
    return 0


def _numel(captured: Captured, ref: Ref) -> int:
    sample = captured.samples[ref.tensor]
    return 0 if sample is None else sample.numel()


def with_fixed_workspace(captured: Captured, measured: list[int]) -> tuple[int, ...]:
    """Measured workspaces, with those that are known from elsewhere put in."""
    for op, size_bytes in captured.fixed_workspace:
        measured[op] = size_bytes
    return tuple(measured)


def estimate_ns(captured: Captured, op: int) -> int:
    """A guess for one op of a device that is here but could not run it alone."""
    return _time_ns(captured, op, device("h100" if captured.device.type == "cuda" else "cpu"))


def is_free(captured: Captured, op: int) -> bool:
    """Views and bookkeeping: no kernel runs."""
    call, node = captured.calls[op], captured.graph.ops[op]
    return call.role is not Role.CALL or all(captured.graph.is_view(node, t) for t in node.outputs)


def _time_ns(captured: Captured, op: int, target: Device) -> int:
    if captured.calls[op].role is Role.ACCUMULATE:
        return _accumulate_ns(captured, op, target)
    if is_free(captured, op):
        return 0
    node, inside = captured.graph.ops[op], getattr(captured.calls[op].target, "inside", None)
    if inside is not None:  # a block in slices: its kernels, each as often as there are slices
        launches = len(inside.ops) * (inside.num_slices - 1) * target.launch_ns
        return int(launches + sum(_time_ns(inside.captured, op, target) for op in inside.ops))
    moved = sum(_tensor_bytes(captured, t) for t in (*node.inputs, *node.outputs))
    half = _is_half(captured, node.inputs)
    arithmetic_s = _flops(captured, captured.calls[op]) / (target.half_flops if half else target.fp32_flops)
    name, num_chunks = _own_name(captured.calls[op]), _num_chunks(captured.calls[op])
    if name in _CHUNKED:  # products and passes over a chunk's logits follow each other
        logits = _num_logits(captured, captured.calls[op])
        seconds = arithmetic_s + (moved + _CHUNKED[name][half] * logits) / target.memory_bytes_per_s
        return 8 * num_chunks * target.launch_ns + round(seconds * 1e9)
    seconds = max(arithmetic_s, moved / target.memory_bytes_per_s)
    return (num_chunks if name in _SLICED else 1) * target.launch_ns + round(seconds * 1e9)


def _accumulate_ns(captured: Captured, op: int, target: Device) -> int:
    """Adding into an existing gradient reads two and writes one; keeping the tensor costs nothing."""
    node = captured.graph.ops[op]
    if captured.calls[op].keeps:
        return 0
    return target.launch_ns + round(3 * _tensor_bytes(captured, node.inputs[0]) / target.memory_bytes_per_s * 1e9)


def _tensor_bytes(captured: Captured, tensor: int) -> int:
    sample = captured.samples[tensor]
    return 0 if sample is None else sample.numel() * sample.element_size()


def _is_half(captured: Captured, tensors: tuple[int, ...]) -> bool:
    samples = [captured.samples[t] for t in tensors]
    return any(s is not None and s.dtype in (torch.float16, torch.bfloat16) for s in samples)


def _own_name(call: OpCall) -> str:
    """The name of one of memfit's own implementations: functions, most of them partial ones of their number of chunks."""
    return str(getattr(getattr(call.target, "func", call.target), "__name__", ""))


def _num_chunks(call: OpCall) -> int:
    arguments: tuple[Any, ...] = getattr(call.target, "args", None) or (1,)
    return arguments[0] if isinstance(arguments[0], int) else 1


def _num_logits(captured: Captured, call: OpCall) -> int:
    """Elements of hidden @ weight in a loss in chunks."""
    hidden, weight = call.args[:2] if _own_name(call) == "chunked_loss" else call.args[1:3]
    rows, width = captured.samples[hidden.tensor], captured.samples[weight.tensor]
    assert rows is not None
    assert width is not None
    return int(rows.numel() // max(rows.shape[-1], 1) * width.shape[1])


def _num_scores(captured: Captured, call: OpCall) -> int:
    """Elements of queries times keys in attention by slices."""
    query, key = (captured.samples[ref.tensor] for ref in call.args[1:3])
    assert query is not None
    assert key is not None
    return int(query.numel() // max(query.shape[-1], 1) * key.shape[-2])


def _flops(captured: Captured, call: OpCall) -> float:
    name = _own_name(call)
    if name in _CHUNKED:
        hidden = captured.samples[call.args[0 if name == "chunked_loss" else 1].tensor]
        assert hidden is not None
        product = 2.0 * _num_logits(captured, call) * hidden.shape[-1]
        return float(product if name == "chunked_loss" else 3 * product)
    if name in _FUSED_ATTENTION:
        query, keys = (captured.samples[ref.tensor] for ref in (call.args[:2] if name == "fused_attention" else call.args[1:3]))
        assert query is not None
        assert keys is not None
        return float(_FUSED_ATTENTION[name] * query.numel() * keys.shape[-1])
    if name == "gradient_of_part":
        gradient, weight = (captured.samples[ref.tensor] for ref in call.args[:2])
        start, stop = call.args[2]
        assert gradient is not None
        assert weight is not None
        return float(2 * gradient.numel() * (stop - start) * weight[0, 0].numel())
    formula = flop_registry.get(_SLICED.get(name) or getattr(call.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = map_leaves(lambda x: captured.samples[x.tensor] if isinstance(x, Ref) else x, (call.args, dict(call.kwargs)))
    outputs: Any = tuple(None if t is None else captured.samples[t] for t in call.outputs)
    return float(formula(*args, **kwargs, out_val=outputs if call.unpack else outputs[0]))
