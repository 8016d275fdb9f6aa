"""The heterogeneous chain: every stage with its own sizes and times, one memory in bytes (rotor: Beaumont et al., 2019).

    a_0 ─F_0─> a_1 ─F_1─> a_2 ...      F_s alone leaves a_{s+1}; with "save" it leaves ā_{s+1}, all that B_s needs,
    δ_0 <─B_0─ δ_1 <─B_1─ δ_2 ...      its output included

Opt(m, s, t): reverse stages s … t in m bytes, the input of s held outside m.

    (A) keep the input only:   sum f_s … f_{j-1} + Opt(m - a_j, j, t) + Opt(m, s, j - 1)
    (B) save all of stage s:   f_s + b_s + Opt(m - ā_{s+1}, s + 1, t)

Optimal among schedules that keep a value from its making to its last use ("persistent"); a better one that drops and
remakes the same checkpoint can exist. Sizes are rounded up to `num_grid` parts of the budget. O(stages^3 * num_grid).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.core.budget import Budget
from memfit.core.costs import Costs
from memfit.core.errors import BadInput, InfeasibleBudget, NoPlanFound
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.outcome import Answer, Status
from memfit.core.plan import Timeline
from memfit.core.schedule import Compute, Free, Schedule, Step
from memfit.core.simulate import simulate
from memfit.core.units import format_bytes, parse_bytes

MAX_WORK = 5e9  # stages^3 / 6 * grid
_BASE, _NONE = 0, -1  # choices besides a jump target: save all of stage s; nothing fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`output_bytes` is a_{s+1}; `saved_bytes` is ā_{s+1}, which contains it; `gradient_bytes` is δ_{s+1}."""

    forward_s: float
    backward_s: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int | None = None  # None: as large as the output
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = (self.output_bytes, self.saved_bytes, self.gradient_bytes or 0, self.forward_temporary_bytes, self.backward_temporary_bytes)
        if min(sizes) < 0 or self.saved_bytes < self.output_bytes:
            raise BadInput(f"a stage saves {self.saved_bytes} bytes and outputs {self.output_bytes}: what is saved contains the output.")
        if not all(math.isfinite(t) and t >= 0 for t in (self.forward_s, self.backward_s)):
            raise BadInput(f"a stage takes {self.forward_s} s and {self.backward_s} s: times are finite and 0 or more.")


class Keep(NamedTuple):
    """F_step with all that its backward needs."""

    step: int


class Pass(NamedTuple):
    """F_step leaving its output only; its input is dropped afterwards unless `keep_input`."""

    step: int
    keep_input: bool


class Undo(NamedTuple):
    """B_step, after which its saved data and the gradient it used are dropped; `drop_input`: its input was a checkpoint and goes too."""

    step: int
    drop_input: bool


StageMove = Keep | Pass | Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan(Answer):
    """`cost_s` and `lower_bound_s` are seconds of compute; the schedule stays within `budget_bytes`, which the judge confirms."""

    stages: tuple[Stage, ...]
    input_bytes: int
    budget_bytes: int
    cost_s: float
    lower_bound_s: float
    tables: _Tables

    def moves(self) -> Iterator[StageMove]:
        """The schedule, lazily, by an explicit stack."""
        unit, last = self.tables.unit, len(self.stages) - 1
        start = (self.budget_bytes - self.input_bytes) // unit
        stack: list[tuple[str, int, int, int]] = [("solve", start, 0, last)] if self.stages else []
        checkpoints: set[int] = set()
        while stack:
            task, grid, s, t = stack.pop()
            if task == "undo":
                yield Undo(s, s in checkpoints)
                checkpoints.discard(s)
                continue
            jump = int(self.tables.choice[s, t][grid])
            assert jump != _NONE
            if jump == _BASE:
                yield Keep(s)
                stack.append(("undo", 0, s, s))
                if s < t:
                    stack.append(("solve", grid - self.tables.saved[s], s + 1, t))
                continue
            for i in range(s, jump):
                yield Pass(i, i == s)
            checkpoints.add(jump)
            stack.append(("solve", grid, s, jump - 1))
            stack.append(("solve", grid - self.tables.inputs[jump], jump, t))

    def steps(self) -> Iterator[Step]:
        return _steps(self.moves(), len(self.stages))

    def judge(self) -> Timeline:
        """Replay in the core's judge: true sizes, the whole budget."""
        graph = stage_graph(self.stages, self.input_bytes)
        schedule = Schedule(steps=tuple(self.steps()))
        return simulate(graph, schedule, stage_costs(self.stages, graph), Budget(device_bytes=self.budget_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    unit: int
    inputs: tuple[int, ...]  # a_s in grid units
    saved: tuple[int, ...]  # ā_{s+1}
    cost: npt.NDArray[np.float64]  # (s, t, m)
    choice: npt.NDArray[np.int32]


def plan_heterogeneous(stages: tuple[Stage, ...], *, budget: int | str, input_bytes: int, num_grid: int = 500) -> StagePlan:
    """The best persistent schedule within `budget` bytes, which hold the chain's input and the gradient of its output too."""
    begin = time.perf_counter()
    budget_bytes = parse_bytes(budget, what="budget")
    num = len(stages)
    if num**3 / 6 * num_grid > MAX_WORK:
        raise NoPlanFound(
            f"{num} stages on a grid of {num_grid} take {num**3 / 6 * num_grid:.1e} additions: join stages or use a coarser grid."
        )
    minimum = minimum_bytes(stages, input_bytes)
    if budget_bytes < minimum:
        raise InfeasibleBudget(
            f"{format_bytes(budget_bytes)} is below the proven minimum {format_bytes(minimum)}: one stage's backward needs the chain's input, "
            f'its saved data and both gradients at once. Try budget="{minimum}".',
            minimum_bytes=minimum,
        )
    unit = max(1, -(-budget_bytes // num_grid))
    tables = _fill(stages, input_bytes, budget_bytes, unit)
    cost = float(tables.cost[0, num - 1][(budget_bytes - input_bytes) // unit]) if num else 0.0
    if math.isinf(cost):
        raise NoPlanFound(
            f"no persistent schedule fits {format_bytes(budget_bytes)} with sizes rounded up to {format_bytes(unit)}; the proven minimum is "
            f"{format_bytes(minimum)}. Give a little more memory, or a finer num_grid (now {num_grid})."
        )
    bound = sum(x.forward_s + x.backward_s for x in stages)
    return StagePlan(
        stages=stages,
        input_bytes=input_bytes,
        budget_bytes=budget_bytes,
        status=Status.OPTIMAL if cost <= bound * (1 + 1e-12) else Status.FEASIBLE,
        cost_s=cost,
        lower_bound_s=bound,
        seconds=time.perf_counter() - begin,
        reason="Optimal among persistent schedules on this grid; the bound is the time without any recomputation.",
        tables=tables,
    )


def _gradients(stages: tuple[Stage, ...], input_bytes: int) -> list[int]:
    """δ_0 … δ_n."""
    return [input_bytes, *(x.output_bytes if x.gradient_bytes is None else x.gradient_bytes for x in stages)]


def minimum_bytes(stages: tuple[Stage, ...], input_bytes: int) -> int:
    """No schedule fits less: every backward needs its own input, saved data and both gradients beside the chain's input."""
    gradients = _gradients(stages, input_bytes)
    inputs = [0, *(x.output_bytes for x in stages)]  # the chain's own input is counted once, below
    needs = [inputs[s] + x.saved_bytes + gradients[s] + gradients[s + 1] + x.backward_temporary_bytes for s, x in enumerate(stages)]
    return input_bytes + max(needs, default=0)


def _fill(stages: tuple[Stage, ...], input_bytes: int, budget_bytes: int, unit: int) -> _Tables:
    def up(size: int) -> int:
        return -(-size // unit)

    num = len(stages)
    inputs = [up(x) for x in (input_bytes, *(x.output_bytes for x in stages))]
    saved = [up(x.saved_bytes) for x in stages]
    gradients = [up(x) for x in _gradients(stages, input_bytes)]
    ahead = [up(x.forward_temporary_bytes) for x in stages]
    back = [up(x.backward_temporary_bytes) for x in stages]
    elapsed = np.concatenate(([0.0], np.cumsum([x.forward_s for x in stages])))
    size = max((budget_bytes - input_bytes) // unit, 0) + 1
    grid = np.arange(size)
    cost = np.full((num, num, size), np.inf)
    after = np.full((num, num, size), np.inf)  # after[t, j]: stages j to t with their input kept in the memory given
    choice = np.full((num, num, size), _NONE, dtype=np.int32)
    for s in range(num - 1, -1, -1):
        for t in range(s, num):
            here = stages[s].forward_s + stages[s].backward_s
            need = max(saved[s] + gradients[t + 1] + ahead[s], saved[s] + gradients[s] + gradients[s + 1] + back[s])
            best = np.where(grid >= need, here + (_shift(cost[s + 1, t], saved[s]) if s < t else 0.0), np.inf)
            pick = np.where(np.isfinite(best), _BASE, _NONE).astype(np.int32)
            if s < t:  # every jump at once: row j - s - 1 keeps a_j and comes back for the stages before it
                jumps = np.arange(s + 1, t + 1)
                passing = [(inputs[i] if i > s else 0) + inputs[i + 1] + ahead[i] for i in range(s, t)]
                needs = gradients[t + 1] + np.maximum.accumulate(passing)
                others = (elapsed[jumps] - elapsed[s])[:, None] + after[t, s + 1 : t + 1] + cost[s, s:t]
                others[grid[None, :] < needs[:, None]] = np.inf
                row = others.argmin(axis=0)
                least = others[row, grid]
                better = least < best
                best[better], pick[better] = least[better], jumps[row[better]]
            cost[s, t], choice[s, t] = best, pick
            after[t, s] = _shift(best, inputs[s])
    return _Tables(unit=unit, inputs=tuple(inputs), saved=tuple(saved), cost=cost, choice=choice)


def _shift(row: npt.NDArray[np.float64], less: int) -> npt.NDArray[np.float64]:
    """row[m - less] at position m."""
    if less == 0:
        return row
    moved = np.full(len(row), np.inf)
    if less < len(row):
        moved[less:] = row[:-less]
    return moved


# -- in the core's words: storages a_0 … a_n, ā_1 … ā_n, δ_0 … δ_n ---------------------------------------------------


def stage_graph(stages: tuple[Stage, ...], input_bytes: int) -> Graph:
    """F_s reads a_s (alone or inside ā_s) and makes a_{s+1} or ā_{s+1}: variants 0 to 3; B_s reads its input, ā_{s+1} and δ_{s+1}."""
    num = len(stages)
    plain = [Storage(id=0, size_bytes=input_bytes, kind=Kind.INPUT, name="a0")]
    plain += [Storage(id=s + 1, size_bytes=x.output_bytes, name=f"a{s + 1}") for s, x in enumerate(stages)]
    whole = [Storage(id=num + 1 + s, size_bytes=x.saved_bytes, name=f"saved{s + 1}") for s, x in enumerate(stages)]
    slopes = [
        Storage(id=2 * num + 1 + s, size_bytes=size, kind=Kind.GRADIENT, name=f"grad{s}")
        for s, size in enumerate(_gradients(stages, input_bytes))
    ]
    storages = (*plain, *whole, *slopes)
    ops = []
    for s in range(num):
        variants = [Variant(name="save", inputs=(s,), outputs=(num + 1 + s,))]
        if s:
            variants += [
                Variant(name="from saved", inputs=(num + s,), outputs=(s + 1,)),
                Variant(name="from saved, save", inputs=(num + s,), outputs=(num + 1 + s,)),
            ]
        ops.append(Op(id=s, name=f"F{s}", inputs=(s,), outputs=(s + 1,), variants=tuple(variants)))
    for s in range(num - 1, -1, -1):
        rest, out = (num + 1 + s, 2 * num + 2 + s), (2 * num + 1 + s,)
        others = (Variant(name="from saved", inputs=(num + s, *rest), outputs=out),) if s else ()
        ops.append(Op(id=len(ops), name=f"B{s}", inputs=(s, *rest), outputs=out, variants=others))
    tensors = tuple(Tensor(id=x.id, storage=x.id, name=x.name) for x in storages)
    return Graph(ops=tuple(ops), tensors=tensors, storages=storages, sources=(0, 3 * num + 1), results=(2 * num + 1,))


def stage_costs(stages: tuple[Stage, ...], graph: Graph) -> Costs:
    times = [round(x.forward_s * 1e9) for x in stages] + [round(x.backward_s * 1e9) for x in reversed(stages)]
    spaces = [x.forward_temporary_bytes for x in stages] + [x.backward_temporary_bytes for x in reversed(stages)]
    return Costs(
        op_time_ns=tuple(times),
        workspace_bytes=tuple(spaces),
        variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(times, graph.ops, strict=True)),
        variant_workspace_bytes=tuple((w,) * len(op.variants) for w, op in zip(spaces, graph.ops, strict=True)),
        graph_digest=graph.digest,
    )


def _steps(moves: Iterator[StageMove], num: int) -> Iterator[Step]:
    saved: set[int] = set()  # stages whose ā is there: the next stage reads its input inside it
    for move in moves:
        s = move.step
        inside = s - 1 in saved
        if isinstance(move, Keep):
            yield Compute(s, 3 if inside else 1)
            saved.add(s)
        elif isinstance(move, Pass):
            yield Compute(s, 2 if inside else 0)
            if not move.keep_input:
                yield Free(s)
        else:
            yield Compute(2 * num - 1 - s, 1 if inside else 0)
            yield Free(num + 1 + s)
            yield Free(2 * num + 2 + s)
            saved.discard(s)
            if move.drop_input:
                yield Free(s)
