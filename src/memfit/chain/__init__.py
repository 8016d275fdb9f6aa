"""Backpropagation chains: when to keep a state, where, and when to compute it again. Every algorithm is one file.

Chain (length, costs, levels)  ──plan_*──>  ChainPlan (cost, proof, lazily emitted moves and core steps)
"""

from memfit.chain.disk_revolve import disk_chain, plan_disk_revolve
from memfit.chain.heterogeneous import Stage, StagePlan, plan_heterogeneous
from memfit.chain.hrevolve import plan_hrevolve
from memfit.chain.mixed import MixedPlan, plan_mixed
from memfit.chain.moves import Advance, Back, Counts, Drop, Move, Read, Write
from memfit.chain.online import OnlineCheckpoints, plan_online
from memfit.chain.periodic import plan_periodic
from memfit.chain.plan import ChainPlan, cost_of
from memfit.chain.problem import Chain, StorageLevel, single_level
from memfit.chain.recompute_all import plan_recompute_all
from memfit.chain.revolve import plan_revolve
from memfit.chain.sqrt import plan_sqrt
from memfit.chain.store_all import plan_store_all

PLANNERS = {
    "h-revolve": plan_hrevolve,
    "revolve": plan_revolve,
    "disk-revolve": plan_disk_revolve,
    "periodic": plan_periodic,
    "online": plan_online,
    "sqrt": plan_sqrt,
    "store-all": plan_store_all,
    "recompute-all": plan_recompute_all,
}
"""Every planner of a Chain by name; h-revolve is the optimal one for any chain."""

__all__ = [
    "PLANNERS",
    "Advance",
    "Back",
    "Chain",
    "ChainPlan",
    "Counts",
    "Drop",
    "MixedPlan",
    "Move",
    "OnlineCheckpoints",
    "Read",
    "Stage",
    "StagePlan",
    "StorageLevel",
    "Write",
    "cost_of",
    "disk_chain",
    "plan_disk_revolve",
    "plan_heterogeneous",
    "plan_hrevolve",
    "plan_mixed",
    "plan_online",
    "plan_periodic",
    "plan_recompute_all",
    "plan_revolve",
    "plan_sqrt",
    "plan_store_all",
    "single_level",
]
