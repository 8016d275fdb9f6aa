"""The lecture's counting exercise (SOURCES D20): ten matmul layers, one checkpoint, how many matmuls?

    x ─ W0 ─> z0 ─ W1 ─> z1 ─ ... ─> z5 (kept) ─ ... ─> z9 ─> sum            30 = 10 forward + 20 backward without recomputation

The slides count 75. Their rematerializer closes over the loop's variables, so when it is finally called every one of the nine
dropped values is "rebuilt" by the same five matmuls, `weights[5:10]` applied to z5: 30 + 9·5 = 75, and wrong values besides.
Rebuilt from the nearest checkpoint, value by value, it takes 30 + (1+2+3+4+5) + (1+2+3) = 51 (z9 is never needed: the gradient
of a sum reads nothing). Keeping what is rebuilt until its last reader, 30 + 5 + 3 = 38. A planner is told only the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.schedule import Schedule
from memfit.tape.array import Tape
from memfit.tape.gradient import gradients
from memfit.tape.program import Program, compile_program
from memfit.tape.schedules import drop_early, recompute_dropped
from memfit.tape.spec import Data

NUM_LAYERS, CHECKPOINT = 10, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TenLayers:
    """The program, its costs in matmuls (every other op is free), and the storages of z0 ... z9."""

    program: Program
    matmul_costs: Costs
    values: tuple[int, ...]


def ten_layers(*, size: int = 16, batch: int = 64, seed: int = 0) -> TenLayers:
    rng = np.random.default_rng(seed)
    tape = Tape()
    x = tape.array(rng.standard_normal((batch, size)), requires_grad=True)
    weights = [tape.parameter(rng.standard_normal((size, size)) / np.sqrt(size)) for _ in range(NUM_LAYERS)]
    h, states = x, []
    for weight in weights:
        h = h @ weight
        states.append(h)
    loss = h.sum()
    program = compile_program([loss, *gradients(loss, [x, *weights])])
    made = [op.outputs[0] for op in program.graph.ops if op.name == "matmul"][:NUM_LAYERS]
    assert len(states) == len(made)
    return TenLayers(program=program, matmul_costs=_in_matmuls(program.graph), values=tuple(map(program.graph.storage_of, made)))


def _in_matmuls(graph: Graph) -> Costs:
    times = tuple(int(op.name == "matmul") for op in graph.ops)
    return Costs(
        op_time_ns=times,
        workspace_bytes=(0,) * len(times),
        variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(times, graph.ops, strict=True)),
        variant_workspace_bytes=tuple((0,) * len(op.variants) for op in graph.ops),
        graph_digest=graph.digest,
    )


def nearest_checkpoint(case: TenLayers, *, share: bool) -> Schedule:
    """z5 kept, everything else dropped after the forward pass and rebuilt from the nearest kept value."""
    program = case.program
    order = recompute_dropped(program.graph, {case.values[CHECKPOINT]}, program.num_forward_ops, share=share)
    return drop_early(program.graph, order)


def count_matmuls(graph: Graph, schedule: Schedule) -> int:
    return sum(graph.ops[step.op].name == "matmul" for step in schedule.computes)


def as_in_the_slides(*, size: int = 4, batch: int = 3, seed: int = 0, bind_late: bool = True) -> tuple[int, bool]:
    """The slides' own loop, run: how many matmuls it takes, and whether every rebuilt value is right.

    With `bind_late=False` each rematerializer keeps its own variables and starts after its checkpoint: the slip repaired.
    """
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal((size, size)) for _ in range(NUM_LAYERS)]
    counted = 0

    def matmul(a: Data, b: Data) -> Data:
        nonlocal counted
        counted += 1
        product: Data = a @ b
        return product

    x = rng.standard_normal((batch, size))
    values: list[Data] = []
    rebuilders: dict[int, tuple[Data, int, int]] = {}
    last, start = x, 0
    for i, w in enumerate(weights):
        previous = values[-1] if values else x
        values.append(matmul(previous, w))
        if i == CHECKPOINT:
            last, start = values[-1], i + 1
        else:
            rebuilders[i] = (last, start, i)
    late = (values[CHECKPOINT], CHECKPOINT, NUM_LAYERS - 1)  # what the closures see when the loop is over
    right = True
    for i in reversed(range(NUM_LAYERS)):
        if i in rebuilders and (bind_late or i < NUM_LAYERS - 1):
            value, first, stop = late if bind_late else rebuilders[i]
            for w in weights[first : stop + 1]:
                value = matmul(value, w)
            right &= bool(np.allclose(value, values[i]))
        counted += 2  # the layer's own two gradient products
    return counted, right
