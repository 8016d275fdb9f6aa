"""What stands between memfit and a goal on a GPU: plan and proven bound at a third of eager's peak, with the costs that `compiled.py measure --keep` measured.

No plan made of the regions and forms measured there can be faster than the bound; where even that is above the goal, only other kernels would reach it.
"""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import peaks_before, records
from benchmarks.lib.results import command, commit
from benchmarks.lib.tables import bounds
from memfit.planning import plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="folder with MODEL.pickle")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines of compiled.py measure")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are appended here")
    args = parser.parse_args()
    rows = []
    for path in sorted(args.keep.glob("*.pickle")):
        row = {**bound(path, args.rows, args.seconds), "commit": commit(), "command": command()}
        rows.append(row)
        with args.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    print("\n".join(bounds({}, rows)))


def bound(path: Path, rows: Path, seconds: float) -> dict[str, Any]:
    """The offer with the fastest plan; the bound that holds for all of them."""
    model = path.stem
    compiled = [r["ms"] for r in records(rows) if r["model"] == model and r["what"] in ("compile", "compile again")]
    limit = peaks_before(rows, model, "eager")[-1] // 3
    found = []
    for graph, costs in pickle.loads(path.read_bytes()):
        whole = plan(graph, costs, None, planner="keep_all").require_plan().timeline
        outcome = plan(graph, costs, limit - max(2 * 2**20, limit // 200), time_limit_s=seconds)
        time_ns = outcome.plan.timeline.time_ns if outcome.plan else None
        found.append({"keep_all_ns": whole.time_ns, "plan_ns": time_ns, "bound_ns": outcome.lower_bound_ns, "status": outcome.status.name})
    best = min(found, key=lambda f: f["plan_ns"] or 2**62)
    return {
        "model": model,
        "budget_bytes": limit,
        "compile_ms": compiled,
        "offers": found,
        **best,
        "bound_ns": min(f["bound_ns"] for f in found),
    }
