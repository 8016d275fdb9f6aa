"""Costs without the device: an op takes the longer of its arithmetic and its memory traffic, plus a launch.

Good to a factor of two on single ops, much better on their ratios, which is what planning needs.
"""

from __future__ import annotations

from memfit.capture.captured import Captured, Role
from memfit.core.costs import Costs, Level
from memfit.kernels.implementation import Work, count_bytes
from memfit.profile.devices import Device, device


def roofline(captured: Captured, name: str) -> Costs:
    """Costs on the named device of the table. No variant is priced below its op: a kernel that saves bytes is seldom faster for it."""
    target, ops = device(name), captured.graph.ops
    plain = [_find_work(captured, op.id) for op in ops]
    others = [tuple(captured.work(call) for call in calls) for calls in captured.variant_calls] or [()] * len(ops)
    times = tuple(_time_ns(work, target) for work in plain)
    return Costs(
        op_time_ns=times,
        workspace_bytes=captured.put_in_fixed_workspace(work.workspace_bytes for work in plain),
        variant_time_ns=tuple(tuple(max(ns, _time_ns(work, target)) for work in works) for ns, works in zip(times, others, strict=True)),
        variant_workspace_bytes=tuple(tuple(work.workspace_bytes for work in works) for works in others),
        levels=(
            Level(
                write_bytes_per_s=target.link_bytes_per_s,
                read_bytes_per_s=target.link_bytes_per_s,
                write_latency_ns=10_000,
                read_latency_ns=10_000,
            ),
        ),
        device=target.name,
        graph_digest=captured.graph.digest,
    )


def estimate_ns(captured: Captured, op: int) -> int:
    """A guess for one op of a device that is here but could not run it alone."""
    return _time_ns(_find_work(captured, op), device("h100" if captured.device.type == "cuda" else "cpu"))


def _find_work(captured: Captured, op: int) -> Work:
    call = captured.calls[op]
    if call.role is Role.ACCUMULATE and not call.keeps:  # reads two gradients and writes their sum
        return Work(moved_bytes=3 * count_bytes(captured.samples[captured.graph.ops[op].inputs[0]]))
    return Work(launches=0) if captured.is_free(op) else captured.work(call)


def _time_ns(work: Work, target: Device) -> int:
    arithmetic_s = work.flops / (target.half_flops if work.half else target.fp32_flops)
    seconds = max(arithmetic_s, work.moved_bytes / target.memory_bytes_per_s)
    return work.launches * target.launch_ns + round(seconds * 1e9) + sum(_time_ns(part, target) for part in work.then)
