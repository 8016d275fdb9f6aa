"""`python -m memfit.schedules`: list the ready-made schedules, or with --write make them again."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.core.budget import Budget
from memfit.core.io import save, write_text
from memfit.core.units import format_bytes, format_percent
from memfit.schedules import FOLDER, RECIPES, example, index, names, path

_TIME_LIMIT_S = 10.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m memfit.schedules", description=__doc__)
    parser.add_argument("--write", action="store_true", help="plan every schedule again and overwrite the files")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write; the package's own folder without")
    parser.add_argument("--path", metavar="NAME", help="print where a schedule lies, for memfit run --plan")
    options = parser.parse_args(arguments)
    if options.path:
        print(path(options.path))
    elif options.write:
        write(options.folder)
    else:
        for name, about in index().items():
            print(
                f"{name}: memfit.schedules:{about['factory']}, {format_bytes(about['peak_bytes'])} instead of "
                f"{format_bytes(about['keep_all_peak_bytes'])}, {format_percent(about['overhead_fraction'])} more op time, torch {about['torch']}"
            )


def write(folder: Path) -> None:
    """Plan and save all of them, with costs from the device table, so that every machine makes the same."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {name: make(name, folder) for name in names()}
    write_text(json.dumps(about, indent=1) + "\n", folder / "index.json", force=True)
    print(f"Wrote {len(about)} schedules to {folder}; next: python -m memfit.schedules", file=sys.stderr)


def make(name: str, folder: Path) -> dict[str, Any]:
    import torch

    from memfit.pipeline.study import study
    from memfit.planning import plan

    model, inputs, loss_fn, targets = example(name)
    studied = study(model, inputs, loss_fn=loss_fn, example_targets=targets, device="cpu")
    graph, costs = studied.captured.graph, studied.costs
    whole = plan(graph, costs, planner="keep_all").require_plan().timeline
    budget = int(whole.peak_bytes * float(str(RECIPES[name]["fraction"])))
    found = plan(graph, costs, budget, time_limit_s=_TIME_LIMIT_S).require_plan()
    save(replace(found, budget=Budget(device_bytes=budget)), folder / f"{name}.json", force=True)
    return {
        **RECIPES[name],
        "torch": torch.__version__.split("+")[0],
        "budget_bytes": budget,
        "peak_bytes": found.timeline.peak_bytes,
        "keep_all_peak_bytes": whole.peak_bytes,
        "overhead_fraction": round(found.timeline.compute_time_ns / whole.compute_time_ns - 1, 4),
    }


if __name__ == "__main__":
    main()
