"""The lecture's counting exercise (SOURCES D20): ten matmul layers, one checkpoint, how many matmuls?

    x ─ W0 ─> z0 ─ W1 ─> z1 ─ ... ─> z5 (kept) ─ ... ─> z9 ─> sum            30 = 10 forward + 20 backward without recomputation

The slides count 75. Their rematerializer closes over the loop's variables, so when it is finally called every one of the nine
dropped values is "rebuilt" by the same five matmuls, `weights[5:10]` applied to z5: 30 + 9·5 = 75, and wrong values besides.
Rebuilt from the nearest checkpoint, value by value, it takes 30 + (1+2+3+4+5) + (1+2+3) = 51 (z9 is never needed: the gradient
of a sum reads nothing). Keeping what is rebuilt until its last reader, 30 + 5 + 3 = 38. A planner is told only the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.schedule import Schedule
from memfit.tape.array import Tape
from memfit.tape.array_view import Data
from memfit.tape.gradient import gradients
from memfit.tape.plain_schedules import drop_early, recompute_dropped
from memfit.tape.program import Program, compile_program

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
    return TenLayers(program=program, matmul_costs=_count_in_matmuls(program.graph), values=tuple(map(program.graph.storage_of, made)))


def _count_in_matmuls(graph: Graph) -> Costs:
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


def run_the_slides(*, size: int = 4, batch: int = 3, seed: int = 0, bind_late: bool = True) -> tuple[int, bool]:
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


def least_matmuls(case: TenLayers, budget_bytes: int) -> int | None:
    """The optimum in a budget, over every way to keep, drop and rebuild z0 ... z9 while ops first run in recorded order.

    Shortest path over (ops run, which z are held): 34 · 2¹⁰ states. None if nothing fits.
    """
    graph = case.program.graph
    bit = {storage: 1 << k for k, storage in enumerate(case.values)}
    maker = {graph.storage_of(op.outputs[0]): op.id for op in reversed(graph.ops)}
    between, during = _other_bytes(graph, set(bit))
    unit = graph.storages[case.values[0]].size_bytes

    def needs(op: int) -> int:
        return sum(bit[s] for s in {graph.storage_of(t) for t in graph.ops[op].inputs} if s in bit)

    def moves(position: int, mask: int) -> Iterator[tuple[int, int, int]]:
        for storage, flag in bit.items():
            op = maker[storage]
            if mask & flag:
                yield 0, position, mask & ~flag
            elif op < position and needs(op) & ~mask == 0 and between[position] + unit * (mask | flag).bit_count() <= budget_bytes:
                yield 1, position, mask | flag
        made = mask | bit.get(graph.storage_of(graph.ops[position].outputs[0]), 0)
        if needs(position) & ~mask == 0 and during[position] + unit * made.bit_count() <= budget_bytes:
            yield case.matmul_costs.op_time_ns[position], position + 1, made

    least, heap = {(0, 0): 0}, [(0, 0, 0)]
    while heap:
        cost, position, mask = heappop(heap)
        if position == len(graph.ops):
            return cost
        if cost > least[position, mask]:
            continue
        for more, *state in moves(position, mask):
            key = (state[0], state[1])
            if cost + more < least.get(key, 1 << 30):
                least[key] = cost + more
                heappush(heap, (cost + more, *key))
    return None


def _other_bytes(graph: Graph, values: set[int]) -> tuple[list[int], list[int]]:
    """Bytes of everything but the z, before and during each op of the recorded order."""
    held = {graph.storage_of(t) for t in graph.results} - values
    born = {graph.storage_of(t): -1 for t in graph.sources}
    last = dict.fromkeys(held, len(graph.ops))
    for op in graph.ops:
        for t in op.outputs:
            born.setdefault(graph.storage_of(t), op.id)
        for t in op.inputs:
            last[graph.storage_of(t)] = max(last.get(graph.storage_of(t), -1), op.id)
    others = [(graph.storages[s].size_bytes, born[s], last.get(s, born[s])) for s in born if s not in values]
    between = [sum(size for size, start, stop in others if start < p <= stop) for p in range(len(graph.ops))]
    during = [sum(size for size, start, stop in others if start <= p <= stop) for p in range(len(graph.ops))]
    return between, during
