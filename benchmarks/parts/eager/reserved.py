"""Reserved against allocated on a GPU: the caching allocator as it comes, expandable segments, and memfit's planned arena."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.results import ROOT

ALLOCATORS = ("default", "expandable", "arena")
WARM_STEPS, TIMED_STEPS = 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="resnet50,unet,gpt2")
    parser.add_argument("--fraction", type=float, default=0.5, help="budget as a fraction of eager's activation bytes")
    parser.add_argument("--output", type=Path, required=True, help="folder for plans, logs and reserved.jsonl")
    parser.add_argument("--scale", type=float, default=1.0, help="of the batch sizes")
    parser.add_argument("--engine", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--record", action="store_true", help="write every allocation of the models' steps, whole and at --fraction")
    parser.add_argument(
        "--one", nargs=2, metavar=("MODEL", "ALLOCATOR"), help="one model in this process; 'plan' and 'record' are jobs too"
    )
    args = parser.parse_args()
    if args.one and args.one[1] == "plan":
        make_plan(args.one[0], args)
    elif args.one and args.one[1] == "record":
        record(args.one[0], args)
    elif args.one:
        row = measure(args.one[0], args.one[1], args)
        with locked(args.output), (args.output / "reserved.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    else:
        args.output.mkdir(exist_ok=True, parents=True)
        names = args.models.split(",")
        if args.record:
            run_all(args, [(n, "record") for n in names])
            return
        run_all(args, [(n, "plan") for n in names])
        run_all(args, [(n, a) for n in names for a in ALLOCATORS])


def run_all(args: argparse.Namespace, jobs: list[tuple[str, str]]) -> None:
    """All at once: tracing takes most of the time, and the GPU is taken in turns."""
    started = []
    for model, allocator in jobs:
        environment = dict(os.environ)
        if allocator == "expandable":
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "eager.py"),
            "reserved",
            "--fraction",
            str(args.fraction),
            "--scale",
            str(args.scale),
            "--output",
            str(args.output),
        ]
        command += ["--engine", args.engine]
        with (args.output / f"{model}-{allocator}.log").open("w") as log:
            started.append(
                (model, allocator, subprocess.Popen([*command, "--one", model, allocator], env=environment, stdout=log, stderr=log))
            )
    for model, allocator, process in started:
        code = process.wait()
        log = (args.output / f"{model}-{allocator}.log").read_text()
        print(f"{model} {allocator}: {'done' if code == 0 else 'FAILED'} {log[-1500:] if code else ''}", flush=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Training:
    """A model of the published comparisons on the GPU."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import torch

        from benchmarks.models.peers import PEERS

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.peer, self.engine = PEERS[name], args.engine
        torch.manual_seed(0)
        self.model = self.peer.model("cuda")
        self.inputs, self.targets = self.peer.data("cuda", args.scale)
        self.fixed_bytes = torch.cuda.memory_allocated()

    def autocast(self) -> Any:
        import torch

        return torch.autocast("cuda", torch.bfloat16, enabled=self.peer.autocast)

    def fit(self, **options: Any) -> Any:
        import memfit

        with self.autocast():
            options |= {"loss_fn": self.peer.loss, "example_targets": self.targets, "check": False, "engine": self.engine}
            allow = ("recompute",) if self.engine == "eager" else ("recompute", "variants")
            return memfit.fit(self.model, self.inputs, allow=allow, **options)

    def step(self, fitted: Any) -> Any:
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            loss = fitted(*self.inputs, *self.targets)
        loss.backward()
        return loss


def make_plan(name: str, args: argparse.Namespace) -> None:
    """One plan per model, which every allocator then runs."""
    import memfit

    training, folder = Training(name, args), args.output
    whole = training.fit(budget=2**50)
    peak = whole.plan.timeline.peak_bytes
    budget = training.fixed_bytes + int((peak - training.fixed_bytes) * args.fraction)
    fitted = training.fit(budget=budget, time_limit_s=6)
    memfit.save(fitted.plan, folder / f"{name}.plan.json", force=True)
    (folder / f"{name}.json").write_text(json.dumps({"budget_bytes": budget, "keep_all_peak_bytes": peak}))


def record(name: str, args: argparse.Namespace) -> None:
    """Every allocation of a step as the allocator saw it, library workspaces included: (size, start, stop), one line per plan.

    What is still alive when the step has ended stops at its end; costs are a roofline's, which is quick.
    """
    import torch

    import memfit

    ours = memfit.use_planned_arena()
    training, folder = Training(name, args), args.output
    budget = 2**50
    for share in (1.0, args.fraction):
        fitted = training.fit(budget=budget, device="h200", time_limit_s=6)
        budget = training.fixed_bytes + int((fitted.plan.timeline.peak_bytes - training.fixed_bytes) * args.fraction)
        for _ in range(3):
            training.step(fitted)
        torch.cuda.synchronize()
        assert ours.unsettled is not None
        step, run = ours.unsettled
        rows, end = ours.library.read_run(run, ours.library.verdict(run).made)
        line = {"model": name, "share": share, "arena_height_bytes": step.height_bytes, "packings": step.num_packings, "end": end}
        buffers = [[int(size), int(start), int(stop) if stop >= 0 else end] for size, start, stop in rows]
        with locked(folder), (folder / "recorded.jsonl").open("a") as file:
            file.write(json.dumps({**line, "torch": torch.__version__, "size_start_stop": buffers}) + "\n")


def measure(name: str, allocator: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps under memfit.fit; what the allocator held, what it had taken from the device, and the time of a step."""
    import torch

    import memfit
    from memfit.core.lifetimes import lifetimes, max_load
    from memfit.offsets import layout_plan

    ours = memfit.use_planned_arena() if allocator == "arena" else None
    training, folder = Training(name, args), args.output
    planned = json.loads((folder / f"{name}.json").read_text())
    fitted = training.fit(budget=2**50, plan=folder / f"{name}.plan.json")
    ready = fitted._memfit._current().ready
    items = lifetimes(ready.captured.graph, fitted.plan.schedule, ready.costs)
    layout = layout_plan(ready.captured.graph, fitted.plan.schedule, ready.costs, alignment_bytes=512)
    with locked(folder):
        torch.cuda.empty_cache()
        steps, times, losses = [], [], []
        for k in range(WARM_STEPS + TIMED_STEPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            loss = training.step(fitted)
            torch.cuda.synchronize()
            if k >= WARM_STEPS:
                times.append(time.perf_counter() - began)
            losses.append(loss.item())
            del loss
            steps.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        free, total = torch.cuda.mem_get_info()  # the whole device's: processes that are done wait for the last
        gradient = sum(p.grad.double().abs().sum().item() for p in training.model.parameters() if p.grad is not None)
    row = {
        "model": name,
        "allocator": allocator,
        "engine": args.engine,
        **planned,
        "predicted_peak_bytes": fitted.report().predicted_peak_bytes,
        "fixed_bytes": training.fixed_bytes,
        "allocated_bytes_per_step": [a for a, _ in steps],
        "reserved_bytes_per_step": [r for _, r in steps],
        "driver_used_bytes": total - free,
        "planned_allocations": len(items),
        "planned_max_load_bytes": max_load(items),
        "planned_height_bytes": layout.height_bytes,
        "step_ms": sorted(1e3 * t for t in times),
        "losses": losses,
        "gradient_sum": gradient,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    if ours is not None:
        step = ready.arena
        verdict = step.last
        row |= {
            "arena_height_bytes": step.height_bytes,
            "arena_bytes": ours.stats().arena_bytes,
            "packings": step.num_packings,
            "last_run": {n: getattr(verdict, n) for n in verdict.__slots__},
        }
    return row
