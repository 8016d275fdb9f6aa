"""Reserved against allocated on a GPU: the caching allocator as it comes, with expandable segments, and the planned layout's height."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="resnet50,unet,gpt2")
    parser.add_argument("--fraction", type=float, default=0.5, help="budget as a fraction of eager's activation bytes")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ALLOCATOR"), help="measure one model in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], args.one[1], args.fraction)))
        return
    for name in args.models.split(","):
        for allocator in ("default", "expandable"):
            environment = dict(os.environ)
            if allocator == "expandable":
                environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
            command = [sys.executable, __file__, "--fraction", str(args.fraction), "--one", name, allocator]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            line = (
                done.stdout.strip().splitlines()[-1] if done.returncode == 0 else json.dumps({"model": name, "error": done.stderr[-400:]})
            )
            print(line, flush=True)
            if args.output:
                with args.output.open("a") as file:
                    file.write(line + "\n")


def measure(name: str, allocator: str, fraction: float) -> dict[str, Any]:
    """Three steps under memfit.fit; what the allocator held and what it had taken from the device."""
    import torch

    import memfit
    from benchmarks.peers import PEERS
    from memfit.core.lifetimes import lifetimes, max_load
    from memfit.planning.layout import layout_plan

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    peer = PEERS[name]
    torch.manual_seed(0)
    model = peer.build().cuda()
    inputs = peer.inputs("cuda", 1.0)
    targets = peer.targets("cuda", 1.0) or inputs
    fixed = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=peer.autocast):
        whole = memfit.fit(model, inputs, budget=2**50, loss_fn=peer.loss, example_targets=targets, check=False, allow=("recompute",))
        budget = fixed + int((whole.plan.timeline.peak_bytes - fixed) * fraction)
        fitted = memfit.fit(
            model, inputs, budget=budget, loss_fn=peer.loss, example_targets=targets, check=False, allow=("recompute",), time_limit_s=6
        )
    torch.cuda.empty_cache()
    peaks = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=peer.autocast):
            loss = fitted(*inputs, *targets)
        loss.backward()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    stats = torch.cuda.memory_stats()
    ready = fitted._memfit._current().ready
    items = lifetimes(ready.captured.graph, fitted.plan.schedule, ready.costs)
    layout = layout_plan(ready.captured.graph, fitted.plan.schedule, ready.costs)
    return {
        "model": name,
        "allocator": allocator,
        "budget_bytes": budget,
        "predicted_peak_bytes": fitted.report().predicted_peak_bytes,
        "allocated_bytes_per_step": [a for a, _ in peaks],
        "reserved_bytes_per_step": [r for _, r in peaks],
        "planned_allocations": len(items),
        "planned_max_load_bytes": max_load(items),
        "planned_height_bytes": layout.height_bytes,
        "allocator_calls_per_step": stats["allocation.all.allocated"] // 4,
        "fixed_bytes": fixed,
    }


if __name__ == "__main__":
    main()
