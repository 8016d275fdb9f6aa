"""Backpropagation chains: when to keep a state, where, and when to compute it again. Every algorithm is one file.

Chain (length, costs, levels)  ──plan_*──>  ChainPlan (cost, proof, lazily emitted moves and core steps)
"""

from __future__ import annotations

from memfit.lazy import Registry, load_on_use

_FILES = {
    "disk_revolve": ("disk_chain", "plan_disk_revolve"),
    "heterogeneous": ("Stage", "StagePlan", "plan_heterogeneous"),
    "hrevolve": ("plan_hrevolve",),
    "mixed": ("MixedPlan", "plan_mixed"),
    "moves": ("Advance", "Back", "Counts", "Drop", "Move", "Read", "Write"),
    "online": ("OnlineCheckpoints", "plan_online"),
    "periodic": ("plan_periodic",),
    "plan": ("ChainPlan", "cost_of"),
    "problem": ("Chain", "StorageLevel", "single_level"),
    "recompute_all": ("plan_recompute_all",),
    "revolve": ("plan_revolve",),
    "sqrt": ("plan_sqrt",),
    "store_all": ("plan_store_all",),
}

PLANNERS = Registry(
    {
        "h-revolve": "memfit.chain.hrevolve:plan_hrevolve",
        "revolve": "memfit.chain.revolve:plan_revolve",
        "disk-revolve": "memfit.chain.disk_revolve:plan_disk_revolve",
        "periodic": "memfit.chain.periodic:plan_periodic",
        "online": "memfit.chain.online:plan_online",
        "sqrt": "memfit.chain.sqrt:plan_sqrt",
        "store-all": "memfit.chain.store_all:plan_store_all",
        "recompute-all": "memfit.chain.recompute_all:plan_recompute_all",
    }
)
"""Every planner of a Chain by name; h-revolve is the optimal one for any chain."""

__getattr__, __dir__, __all__ = load_on_use(__name__, _FILES)
__all__ += ["PLANNERS"]
