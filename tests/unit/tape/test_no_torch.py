"""The engine, its planners and its layouts run where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
for name in ("torch", "matplotlib", "ortools"):
    sys.modules[name] = None          # importing it raises ImportError
from memfit import planning, tape
from memfit.tape.examples import nets
net = nets.mlp(depth=8, width=4, batch=64)
program = tape.compile_program([net.loss, *tape.gradients(net.loss, net.parameters)])
full = planning.plan(program.graph, program.costs, planner="keep_all").require_plan()
plan = planning.plan(program.graph, program.costs, int(0.7 * full.timeline.peak_bytes), planner="greedy").require_plan()
a, b = tape.Executor.of_plan(program, full).run(), tape.Executor.of_plan(program, plan).run()
assert all((x == y).all() for x, y in zip(a, b))
print(plan.timeline.peak_bytes < full.timeline.peak_bytes)
"""


def test_a_budgeted_step_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False, env=_environment())
    assert done.stdout.strip() == "True", done.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
