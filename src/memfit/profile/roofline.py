"""Costs without the device: an op takes the longer of its arithmetic and its memory traffic, plus a launch.

Good to a factor of two on single ops, much better on their ratios, which is what planning needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.costs import Costs, Level
from memfit.profile.devices import Device, device


def roofline(captured: Captured, name: str) -> Costs:
    """Costs on the named device of the table."""
    target = device(name)
    graph = captured.graph
    times = tuple(_time_ns(captured, i, target) for i in range(len(graph.ops)))
    return Costs(
        op_time_ns=times,
        workspace_bytes=with_fixed_workspace(captured, [0] * len(graph.ops)),
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
    node = captured.graph.ops[op]
    moved = sum(_tensor_bytes(captured, t) for t in (*node.inputs, *node.outputs))
    rate = target.half_flops if _is_half(captured, node.inputs) else target.fp32_flops
    seconds = max(_flops(captured, captured.calls[op]) / rate, moved / target.memory_bytes_per_s)
    return target.launch_ns + round(seconds * 1e9)


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


def _flops(captured: Captured, call: OpCall) -> float:
    formula = flop_registry.get(getattr(call.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = tree_map(lambda x: captured.samples[x.tensor] if isinstance(x, Ref) else x, (call.args, dict(call.kwargs)))
    outputs: Any = tuple(None if t is None else captured.samples[t] for t in call.outputs)
    return float(formula(*args, **kwargs, out_val=outputs if call.unpack else outputs[0]))
