"""The room's door: it loads what a caller asks for."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, memfit.planning
from tests.small import training_chain
memfit.planning.plan(training_chain(20, 10), planner="keep_all").require_plan()
import memfit.planning.frontier.monotone
assert callable(memfit.planning.frontier) and memfit.planning.frontier.__name__ == "frontier"
planners = [m for m in sys.modules if m.startswith("memfit.planning.") and m.split(".")[2] in ("baselines", "cuts", "search", "annealing", "offload")]
print([m for m in ("scipy", "numba", "torch") if m in sys.modules], sorted(planners))
"""


def test_keep_all_loads_no_other_planner_and_no_solver() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['memfit.planning.baselines', 'memfit.planning.baselines.keep_all']"
