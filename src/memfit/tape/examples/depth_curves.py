"""Memory against depth for each scheme: the O(n), O(√n) and O(1) curves of the founding documents (SOURCES A7, B9, B10).

bytes │        ·naive                  measured at the predicted peak of every schedule
      │     ·        · exact
      │  ·   ·  ·  ·   ·  · √n         beyond the sources: parameters and inputs grow with depth whatever one does
      └──────────────────────> depth
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memfit.core.plan import Plan
from memfit.tape.array import Array
from memfit.tape.examples.nets import Net, lstm, mlp
from memfit.tape.gradient import gradients
from memfit.tape.memory.modes import Mode, Place, inference_mode, planless_modes, planned_mode
from memfit.tape.plain_schedules import count_recomputations
from memfit.tape.program import Program, compile_program

MakeNet = Callable[[int], Net]
MakePlan = Callable[[Program, int], Plan | None]
"""From a program and its depth to a plan, or None where none was found: how planners, which live elsewhere, come in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One scheme at one depth. Bytes are the peak beyond parameters and inputs."""

    net: str
    scheme: str
    depth: int
    predicted_bytes: int
    measured_bytes: int
    num_ops: int
    num_recomputed: int


def wide_mlp(depth: int) -> Net:
    """A residual MLP with small weights and large activations, so that the curve is the activations'."""
    return mlp(depth=depth, width=4, batch=1024, residual=True)


def wide_lstm(steps: int) -> Net:
    return lstm(steps=steps, width=4, batch=256)


def curve(
    name: str,
    make: MakeNet,
    depths: Sequence[int],
    planners: Mapping[str, MakePlan],
    *,
    place: Place | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Point, ...]:
    """Every scheme at every depth, run once and measured."""
    points = []
    for depth in depths:
        net = make(depth)
        results = [net.loss, *gradients(net.loss)]
        for mode in _modes(results, depth, planners, place, progress):
            progress(f"{name}, depth {depth}: {mode.name}")
            points.append(_point(name, mode, depth))
        progress(f"{name}, depth {depth}: inference")
        points.append(_point(name, inference_mode(compile_program([net.output])), depth))
    return tuple(points)


def _modes(
    results: Sequence[Array], depth: int, planners: Mapping[str, MakePlan], place: Place | None, progress: Callable[[str], None]
) -> list[Mode]:
    modes = [m for m in planless_modes(compile_program(results), place=place) if m.name != "pool"]
    program = compile_program(results, inplace=False)  # planners prove more, and so find more, without variants
    for name, make in planners.items():
        progress(f"depth {depth}: planning {name}")
        plan = make(program, depth)
        if plan is not None:
            modes.append(planned_mode(name, program, plan))
    return modes


def _point(name: str, mode: Mode, depth: int) -> Point:
    held = sum(mode.program.graph.size_of(t) for t in mode.program.graph.sources)
    seen = mode.trace_peak()
    return Point(
        net=name,
        scheme=mode.name,
        depth=depth,
        predicted_bytes=seen.predicted_peak_bytes - held,
        measured_bytes=seen.peak_bytes - held,
        num_ops=len(mode.program.graph.ops),
        num_recomputed=count_recomputations(mode.schedule),
    )
