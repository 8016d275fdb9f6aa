"""The compiled engine against torch.compile, its memory budget and checkpointing: time and memory of each, cold start included.

Every point is measured in a process of its own with an empty compile cache, and written at once: a run that is cut short goes
on where it stopped. Budgets of memfit are shares of torch.compile's own peak, so that row comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.gpu_eager import commit, device_name, gradients, timed, worst_difference
from benchmarks.peers import PEERS, Peer, checkpoint_blocks

PARTS = ("compile", "memfit", "compile + checkpoint", "eager", "eager + checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(PEERS))
    parser.add_argument("--parts", default=",".join(PARTS), help='also "budget 0.5": torch.compile with activation_memory_budget')
    parser.add_argument("--fractions", default="1,0.75,0.5,0.4,0.33,0.25", help="of torch.compile's peak")
    parser.add_argument("--scale", type=float, default=1.0, help="batch size factor (small on a CPU)")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--plan-seconds", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--one", help="measure one part in this process (used by the driver)")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if args.one:
        measure_one(PEERS[args.models], args.one, args)
    else:
        drive(args)


def drive(args: argparse.Namespace) -> None:
    """A process per part; parts with rows in the output are skipped."""
    begin = time.perf_counter()
    for name in args.models.split(","):
        for part in args.parts.split(","):
            done = {(r["model"], r["part"]) for r in records(args.output)}
            if (name, part) in done or time.perf_counter() - begin > args.seconds:
                continue
            with tempfile.TemporaryDirectory() as folder:
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton", "HOME": folder}
                command = [sys.executable, __file__, "--models", name, "--one", part, "--output", str(args.output)]
                command += ["--fractions", args.fractions, "--scale", str(args.scale), "--plan-seconds", str(args.plan_seconds)]
                for attempt in ("cold", "warm") if part == "memfit" else ("cold",):
                    subprocess.run([*command, *(["--fractions", ""] if attempt == "warm" else [])], env=environment, check=False)
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder, exist_ok=True)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure_one(peer: Peer, part: str, args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = {
        "model": peer.name,
        "part": part,
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit(),
        "scale": args.scale,
    }
    try:
        for record in rows(peer, part, device, args):
            _write(args.output, about | record)
    except Exception as error:
        _write(
            args.output, about | {"what": part, "error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-2500:]}
        )


def _write(path: Path, record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)
    with path.open("a") as file:
        file.write(json.dumps(record | {"time": time.time()}) + "\n")


def rows(peer: Peer, part: str, device: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = peer.model(device)
    inputs, targets = peer.data(device, args.scale)
    if part == "memfit":
        yield from planned(peer, model, inputs, targets, device, args)
        return
    if part.endswith("checkpoint"):
        checkpoint_blocks(model, peer.blocks)
    if part.startswith("budget"):
        torch._functorch.config.activation_memory_budget = float(part.split()[1])
    compiled = part != "eager" and not part.startswith("eager")
    forward = torch.compile(_loss_of(peer, model), dynamic=False) if compiled else _loss_of(peer, model)
    step = _step(peer, device, lambda: forward(inputs, targets))
    begin = time.perf_counter()
    step()
    _sync(device)
    first_s = time.perf_counter() - begin
    yield {"what": part, "cold_s": first_s, **timed(step, model, device, held(model, inputs, targets))}


def _loss_of(peer: Peer, model: nn.Module) -> Callable[..., torch.Tensor]:
    def forward(inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = peer.loss(model(*inputs), *targets)
        return loss

    return forward


def _step(peer: Peer, device: str, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=peer.autocast):
            loss = forward()
        loss.backward()
        return loss.detach()

    return step


def held(model: nn.Module, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> int:
    """Bytes there before a step: each tensor once, in the allocator's blocks."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers(), *inputs, *targets)}
    return sum(-(-t.numel() * t.element_size() // 512) * 512 for t in tensors.values())


def planned(
    peer: Peer, model: nn.Module, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...], device: str, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """memfit at several budgets. Tracing, compiling and measuring happen once, and are timed as the cold start."""
    from memfit.capture.inputs import Call
    from memfit.capture.regions import regions_of
    from memfit.core.budget import Budget
    from memfit.core.errors import MemfitError
    from memfit.execute.codegen import generate
    from memfit.execute.session import Ready, Session, run
    from memfit.prepare import PlanSettings, allocator_slack, best_plan
    from memfit.report.progress import Progress
    from memfit.task import Task

    full = next(
        (r["peak_bytes"] for r in records(args.output) if r["model"] == peer.name and r["what"] == "compile" and "peak_bytes" in r), None
    )
    reference = None
    if not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        reference = gradients(_step(peer, device, lambda: _loss_of(peer, model)(inputs, targets)), model)
    task = Task(model=model, loss_fn=peer.loss, num_targets=len(targets), engine="inductor")
    call = Call.flatten((*inputs, *targets), {})
    begin = time.perf_counter()
    offers, record = [], {"regions": [], "ops": [], "choices": []}
    with torch.autocast(device, torch.bfloat16, enabled=peer.autocast), Progress("memfit") as progress:
        for captured in task.offers(call):
            traced = time.perf_counter()
            record.setdefault("capture_s", traced - begin)
            offers.append(task.costed(captured, progress))
            record.setdefault("compile_s", time.perf_counter() - traced)
            record["regions"].append(len(regions_of(captured)))
            record["ops"].append(len(captured.graph.ops))
            record["choices"].append(sum(len(op.variants) + op.name.startswith("again") for op in captured.graph.ops))
    ready_s = time.perf_counter() - begin
    yield {"what": "memfit ready" if args.fractions else "memfit ready again", "cold_s": ready_s, **record}
    sources = (*model.parameters(), *model.buffers(), *call.tensors)
    for fraction in [float(f) for f in args.fractions.split(",") if f]:
        budget = int((full or 2**50) * fraction)
        row = {"what": f"memfit {fraction:.0%}", "budget_bytes": budget, "fraction": fraction}
        begin = time.perf_counter()
        limit = Budget(device_bytes=budget - allocator_slack(offers[0][0], budget))
        try:
            settings = PlanSettings(time_limit_s=args.plan_seconds, compare_all=True)
            with Progress("plan") as progress:
                captured, costs, plan = best_plan(offers, limit, settings, progress)
        except MemfitError as error:
            yield row | {"plan_s": time.perf_counter() - begin, "status": type(error).__name__, "reason": str(error)}
            continue
        row |= {"plan_s": time.perf_counter() - begin, "status": "planned", "offer": [c for c, _ in offers].index(captured)}
        ready = Ready(
            captured=captured, costs=costs, plan=plan, program=generate(captured, plan.schedule), keep_all_peak_bytes=0, base_time_ns=0
        )

        def step(ready: Ready = ready) -> torch.Tensor:
            loss: torch.Tensor = run(Session(ready, sources, trial=False, replan=lambda _: None))
            loss.backward()
            return loss.detach()

        result = timed(step, model, device, held(model, inputs, targets))
        worst = None if reference is None else worst_difference(reference, gradients(step, model))
        times = {"predicted_ms": plan.timeline.time_ns / 1e6, "worst_gradient_difference": worst}
        yield row | {"predicted_peak_bytes": plan.timeline.peak_bytes, **times, **result}


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
