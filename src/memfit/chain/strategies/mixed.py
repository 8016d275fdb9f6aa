"""Mixed checkpointing: a slot holds a state or one step's adjoint data (Maddison, 2024).

    slots │x0      x3   [tape 5] [tape 6]      n steps; B_i needs the tape of F_i, which a slot can keep
          │ state  state  data     data        instead of a state: no forward is then repeated for it

    S(n, s) = n                                               n <= s + 1
              min( 1 + S(n-1, s-1),                           keep the first step's tape
                   min_{2<=i<n} [ i + S(i, s) + S(n-i, s-1) ] )    keep the first state, advance i

S counts every forward, each step's own included: compare it with Revolve's t(n, s) + n. Slots are free to write and read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.chain.moves import Advance, Drop, Read, Write
from memfit.chain.strategies.min_plus_rows import Row, convolve_row, find_split
from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level
from memfit.core.errors import BadInput, InfeasibleBudget
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.outcome import Answer, Status
from memfit.core.plan import Timeline
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step
from memfit.core.simulate import simulate


class Tape(NamedTuple):
    """F_step, keeping its adjoint data in the working area."""

    step: int


class WriteTape(NamedTuple):
    """Move the working adjoint data of F_step to a slot."""

    step: int


class ReadTape(NamedTuple):
    """Move a slot's adjoint data back to the working area."""

    step: int


class Reverse(NamedTuple):
    """B_step: uses up the working adjoint data."""

    step: int


MixedMove = Advance | Write | Read | Drop | Tape | WriteTape | ReadTape | Reverse


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan(Answer):
    """`num_forward` is S(n, s); `num_steps` backward steps, one per forward step."""

    num_steps: int
    slots: int
    num_forward: int
    rows: tuple[Row, ...]

    def moves(self) -> Iterator[MixedMove]:
        """The schedule, lazily, by an explicit stack."""
        stack: list[tuple[str, int, int, int]] = [("solve", self.num_steps, self.slots, 0)] if self.num_steps else []
        while stack:
            task, length, free, base = stack.pop()
            if task == "restart":
                yield Read(base, 0)
                yield Drop(base, 0)
                stack.append(("solve", length, free, base))
            elif task == "tape":
                yield ReadTape(base)
                yield Reverse(base)
            elif length == 1:
                yield Tape(base)
                yield Reverse(base)
            elif length <= free + 1 or 1 + self.rows[free - 1][length - 2] <= self.rows[free][length - 1]:
                yield Tape(base)
                yield WriteTape(base)
                stack.append(("tape", 0, 0, base))
                stack.append(("solve", length - 1, free - 1, base + 1))
            else:
                jump = find_split(self.rows[free - 1], self.rows[free], length - 1, slope=1.0)
                yield Write(base, 0)
                yield Advance(base, base + jump)
                stack.append(("restart", jump, free, base))
                stack.append(("solve", length - jump, free - 1, base + jump))

    def steps(self) -> Iterator[Step]:
        return _steps(self.moves(), self.num_steps)

    def judge(self) -> Timeline:
        """In the core's judge: unit sizes, the working area (state, tape, adjoint) on the device, slots on level 1."""
        graph = make_mixed_graph(self.num_steps)
        times = (1,) * self.num_steps + (0,) * self.num_steps
        costs = Costs(
            op_time_ns=times,
            workspace_bytes=(0,) * len(times),
            variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(times, graph.ops, strict=True)),
            variant_workspace_bytes=tuple((0,) * len(op.variants) for op in graph.ops),
            levels=(Level(),),
            graph_digest=graph.digest,
        )
        return simulate(graph, Schedule(steps=tuple(self.steps())), costs, Budget(device_bytes=3, host_bytes=self.slots))


def make_mixed_rows(num_steps: int, slots: int) -> tuple[Row, ...]:
    """Row s holds S(n, s) at position n - 1."""
    lengths = np.arange(1, num_steps + 1, dtype=np.float64)
    alone = np.full(num_steps, np.inf)
    alone[0] = 1.0
    rows = [alone]
    for free in range(1, slots + 1):
        fallback = np.concatenate(([1.0], 1.0 + rows[-1][:-1]))
        fallback[: free + 1] = lengths[: free + 1]
        rows.append(convolve_row(rows[-1], fallback, slope=1.0, constant=0.0, first=1.0))
    return tuple(rows)


def plan_mixed(num_steps: int, slots: int) -> MixedPlan:
    """The optimal mixed schedule for `num_steps` steps and `slots` free slots."""
    begin = time.perf_counter()
    if num_steps < 0 or slots < 0:
        raise BadInput(f"{num_steps} steps with {slots} slots: both are 0 or more.")
    if slots == 0 and num_steps > 1:
        raise InfeasibleBudget(f"0 slots cannot reverse {num_steps} steps: the first step's data has to wait somewhere. Give 1 slot.")
    slots = min(slots, max(num_steps - 1, 0))
    rows = make_mixed_rows(num_steps, slots) if num_steps else ()
    total = int(rows[slots][num_steps - 1]) if num_steps else 0
    return MixedPlan(
        num_steps=num_steps, slots=slots, num_forward=total, status=Status.OPTIMAL, seconds=time.perf_counter() - begin, rows=rows
    )


def make_mixed_graph(num_steps: int) -> Graph:
    """x_0 … x_n, tapes, adjoints; F_i has a form that makes its tape too, B_i reads tape i and y_{i+1} (B_{n-1} its tape alone)."""
    num = num_steps
    tape, adjoint = num + 1, 2 * num + 1
    names = [f"x{i}" for i in range(num + 1)] + [f"tape{i}" for i in range(num)] + [f"y{i}" for i in range(num)]
    kinds = [Kind.ACTIVATION] * (2 * num + 1) + [Kind.GRADIENT] * num
    storages = tuple(Storage(id=i, size_bytes=1, name=n, kind=k) for i, (n, k) in enumerate(zip(names, kinds, strict=True)))
    ops = [
        Op(
            id=i,
            name=f"F{i}",
            inputs=(i,),
            outputs=(i + 1,),
            inplace_of=((i + 1, i),),
            variants=(Variant(name="tape", inputs=(i,), outputs=(i + 1, tape + i), inplace_of=((i + 1, i),)),),
        )
        for i in range(num)
    ]
    for i in range(num - 1, -1, -1):
        inputs = (tape + i,) if i == num - 1 else (tape + i, adjoint + i + 1)
        pairs = () if i == num - 1 else ((adjoint + i, adjoint + i + 1),)
        ops.append(Op(id=len(ops), name=f"B{i}", inputs=inputs, outputs=(adjoint + i,), inplace_of=pairs))
    tensors = tuple(Tensor(id=s.id, storage=s.id, name=s.name) for s in storages)
    results = (adjoint,) if num else ()
    return Graph(ops=tuple(ops), tensors=tensors, storages=storages, sources=(0,), results=results)


def _steps(moves: Iterator[MixedMove], num: int) -> Iterator[Step]:
    tape = num + 1
    resident: int | None = 0
    for move in moves:
        if isinstance(move, Advance):
            for i in range(move.start, move.stop):
                yield Compute(i)
            resident = move.stop
        elif isinstance(move, Tape):
            yield Compute(move.step, 1)
            resident = move.step + 1
        elif isinstance(move, Write):
            yield Offload(move.step)
        elif isinstance(move, Read):
            if resident is not None:
                yield Free(resident)
            yield Reload(move.step)
            resident = move.step
        elif isinstance(move, Drop):
            yield Free(move.step, 1)
        elif isinstance(move, WriteTape):
            yield Offload(tape + move.step)
            yield Free(tape + move.step)
        elif isinstance(move, ReadTape):
            yield Reload(tape + move.step)
            yield Free(tape + move.step, 1)
        else:
            yield Compute(2 * num - 1 - move.step)
            yield Free(tape + move.step)
