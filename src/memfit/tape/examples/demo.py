"""What `memfit demo --engine numpy` shows, as data: training in every memory mode, the table of modes, memory against depth.

Planners and layouts live in a room this one may not enter, so they come in as functions; printing and drawing happen outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memfit.tape.examples.depth_curves import MakePlan, Point, curve, wide_lstm, wide_mlp
from memfit.tape.examples.nets import mlp
from memfit.tape.examples.training import Trained, spirals, train
from memfit.tape.gradient import gradients
from memfit.tape.memory.modes import Comparison, Place, compare, inference_mode, planless_modes, planned_mode
from memfit.tape.program import compile_program

DEPTH, WIDTH, BATCH, CLASSES = 16, 24, 256, 3
"""Small enough that BLAS stays on one thread: the demo should not depend on what else the machine does."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """`modes` and `inference` are rows of the table; `points` the curves; `trained` one run of training per mode."""

    network: str
    sources_bytes: int
    modes: tuple[Comparison, ...]
    inference: Comparison
    trained: tuple[Trained, ...]
    points: tuple[Point, ...]

    @property
    def same_losses(self) -> bool:
        return len({run.losses for run in self.trained}) == 1


def run_demo(
    planners: Mapping[str, MakePlan],
    curve_planners: Mapping[str, MakePlan],
    *,
    place: Place | None = None,
    depths: Sequence[int] = (10, 30, 100),
    steps: int = 40,
    say: Say = lambda _: None,
) -> Demo:
    """Train a residual MLP on spirals in every mode, compare the modes, and measure memory against depth."""
    net = mlp(depth=DEPTH, width=WIDTH, batch=BATCH, features=2, classes=CLASSES, residual=True)
    data = spirals(BATCH, CLASSES)
    results = [net.loss, *gradients(net.loss, net.parameters)]
    program, plain = compile_program(results), compile_program(results, inplace=False)  # planners prove more without variants
    modes = list(planless_modes(program, place=place))
    for name, make in planners.items():
        say(f"planning {name}")
        plan = make(plain, DEPTH)
        if plan is not None:
            modes.append(planned_mode(name, plain, plan))
    trained = []
    for mode in modes:
        say(f"training in mode {mode.name}")
        trained.append(train(net, mode, data, steps=steps, rate=0.02))
    say("comparing the modes")
    rows = compare(modes)
    (inference,) = compare([inference_mode(compile_program([net.output]))])
    points: list[Point] = []
    for name, make_net in (("residual MLP", wide_mlp), ("LSTM", wide_lstm)):
        points += curve(name, make_net, depths, curve_planners, place=place, progress=say)
    return Demo(
        network=f"residual MLP, {DEPTH} layers of {WIDTH}, batch {BATCH}, {CLASSES} spirals",
        sources_bytes=sum(program.graph.size_of(t) for t in program.graph.sources),
        modes=rows,
        inference=inference,
        trained=tuple(trained),
        points=tuple(points),
    )
