"""How the plain strategies become plans: their moves are counted, priced, and set against the bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from memfit.chain.bounds import lower_bound
from memfit.chain.moves import Move, count
from memfit.chain.plan import ChainPlan, cost_of, infeasible
from memfit.chain.problem import Chain
from memfit.core.errors import BadInput
from memfit.core.outcome import Status


def simple_plan(algorithm: str, chain: Chain, slots_needed: int, emit: Callable[[], Iterator[Move]]) -> ChainPlan:
    """A plan for a strategy that uses level 0 only and needs a fixed number of its slots."""
    begin = time.perf_counter()
    if not chain.levels:
        raise BadInput(f"{algorithm} keeps states in level 0, but the chain has no storage level.")
    available = chain.levels[0].slots
    if available is not None and available < slots_needed:
        return infeasible(
            algorithm,
            chain,
            f"{algorithm} keeps {slots_needed} states of a chain of {chain.num_steps} steps at once, level 0 has {available} slots. "
            f"Give it {slots_needed}, or use revolve, which fits any number from 1 on.",
        )
    cost, bound = cost_of(chain, count(emit(), len(chain.levels))), lower_bound(chain)
    return ChainPlan(
        algorithm=algorithm,
        chain=chain,
        status=Status.OPTIMAL if cost <= bound else Status.FEASIBLE,
        cost=cost,
        lower_bound=bound,
        emit=emit,
        seconds=time.perf_counter() - begin,
        reason=f"{algorithm} follows a fixed rule; the bound is what no schedule in these slots can beat.",
    )
