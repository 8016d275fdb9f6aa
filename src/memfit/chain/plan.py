"""What every chain algorithm returns: its cost, how well that is proven, and a schedule emitted on demand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.chain.moves import Counts, Move, count_moves
from memfit.chain.problem import Chain, to_fraction
from memfit.chain.to_core import chain_budget, chain_costs, chain_graph, level_steps, one_memory_steps
from memfit.core.outcome import Answer, Status
from memfit.core.plan import Plan, Timeline
from memfit.core.schedule import Schedule, Step
from memfit.core.simulate import simulate
from memfit.core.units import simplify_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan(Answer):
    """`cost` is in the chain's unit; `lower_bound` bounds every schedule inside the same slots; `moves()` starts afresh each time."""

    algorithm: str
    chain: Chain
    cost: float
    lower_bound: float
    emit: Callable[[], Iterator[Move]]

    def moves(self) -> Iterator[Move]:
        """The schedule as the papers write it, lazily."""
        self.require()
        return self.emit()

    def steps(self) -> Iterator[Step]:
        """The schedule as the core's steps, lazily."""
        return level_steps(self.moves(), self.chain.num_steps)

    def one_memory_steps(self) -> Iterator[Step]:
        """The steps when the slots of the one level lie beside the working buffer, as in the textbook pictures."""
        same = self.chain.state_bytes == self.chain.adjoint_bytes
        return one_memory_steps(self.moves(), self.chain.num_steps, adjoint_in_place=same)

    def counts(self) -> Counts:
        return count_moves(self.moves(), len(self.chain.levels))

    def judge(self, *, ns_per_unit: float = 1e9, one_memory: bool = False) -> Timeline:
        """Replay the whole schedule in the core's judge, within the slots of every level."""
        graph = chain_graph(self.chain)
        steps = self.one_memory_steps() if one_memory else self.steps()
        budget = None if one_memory else chain_budget(self.chain)
        return simulate(graph, Schedule(steps=tuple(steps)), chain_costs(self.chain, graph, ns_per_unit=ns_per_unit), budget)

    def as_plan(self) -> Plan:
        """A judged core plan, to save or to hand to an engine."""
        timeline = self.judge()
        return Plan(
            schedule=Schedule(steps=tuple(self.steps())),
            timeline=timeline,
            planner=f"chain/{self.algorithm}",
            graph_digest=chain_graph(self.chain).digest,
            budget=chain_budget(self.chain),
        )


def cost_of(chain: Chain, counts: Counts) -> float:
    """The papers' cost of a schedule from what it does, summed without rounding until the end."""
    total = counts.num_forward * to_fraction(chain.forward_cost) + counts.num_backward * to_fraction(chain.backward_cost)
    for level, writes, reads in zip(chain.levels, counts.writes, counts.reads, strict=True):
        total += writes * to_fraction(level.write_cost) + reads * to_fraction(level.read_cost)
    return int(total) if total.denominator == 1 else float(total)


def set_against_bound(
    algorithm: str, chain: Chain, cost: float, bound: float, emit: Callable[[], Iterator[Move]], *, begin: float, reason: str
) -> ChainPlan:
    """A plan that began to be made at `begin` (of `time.perf_counter`); optimal where its cost meets the bound."""
    return ChainPlan(
        algorithm=algorithm,
        chain=chain,
        status=Status.OPTIMAL if cost <= bound else Status.FEASIBLE,
        cost=simplify_number(cost),
        lower_bound=simplify_number(bound),
        emit=emit,
        seconds=time.perf_counter() - begin,
        reason=reason,
    )


def refuse(algorithm: str, chain: Chain, reason: str) -> ChainPlan:
    """The answer that no schedule fits."""
    return ChainPlan(
        algorithm=algorithm,
        chain=chain,
        status=Status.INFEASIBLE,
        cost=math.inf,
        lower_bound=math.inf,
        emit=lambda: iter(()),
        reason=reason,
    )


def refuse_no_slots(algorithm: str, chain: Chain) -> ChainPlan:
    return refuse(
        algorithm,
        chain,
        f"0 slots in {len(chain.levels)} storage level(s) cannot reverse {chain.num_steps} steps: once x_0 has advanced, "
        f"B_{chain.num_steps - 1} needs a state that is kept nowhere; at least 1 slot is needed. Try --slots 1.",
    )
