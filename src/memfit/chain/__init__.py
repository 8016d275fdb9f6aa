"""Backpropagation chains: when to keep a state, where, and when to compute it again. One file per algorithm, in `strategies/`.

Chain (length, costs, levels)  ──plan_*──>  ChainPlan (cost, proof, lazily emitted moves and core steps)
"""

from __future__ import annotations

from memfit.lazy import Registry, load_on_use

_FILES = {
    "moves": ("Advance", "Back", "Counts", "Drop", "Move", "Read", "Write"),
    "plan": ("ChainPlan", "cost_of"),
    "problem": ("Chain", "StorageLevel", "single_level"),
    "strategies.disk_revolve": ("disk_chain", "plan_disk_revolve"),
    "strategies.fixed_rules": ("plan_recompute_all", "plan_sqrt", "plan_store_all"),
    "strategies.heterogeneous": ("Stage", "StagePlan", "plan_heterogeneous"),
    "strategies.hrevolve": ("plan_hrevolve",),
    "strategies.mixed": ("MixedPlan", "plan_mixed"),
    "strategies.online": ("OnlineCheckpoints", "plan_online"),
    "strategies.periodic": ("plan_periodic",),
    "strategies.revolve": ("plan_revolve",),
}

PLANNERS = Registry(
    {
        "h-revolve": "memfit.chain.strategies.hrevolve:plan_hrevolve",
        "revolve": "memfit.chain.strategies.revolve:plan_revolve",
        "disk-revolve": "memfit.chain.strategies.disk_revolve:plan_disk_revolve",
        "periodic": "memfit.chain.strategies.periodic:plan_periodic",
        "online": "memfit.chain.strategies.online:plan_online",
        "sqrt": "memfit.chain.strategies.fixed_rules:plan_sqrt",
        "store-all": "memfit.chain.strategies.fixed_rules:plan_store_all",
        "recompute-all": "memfit.chain.strategies.fixed_rules:plan_recompute_all",
    }
)
"""Every planner of a Chain by name; h-revolve is the optimal one for any chain."""

__getattr__, __dir__, __all__ = load_on_use(__name__, _FILES)
__all__ += ["PLANNERS"]
