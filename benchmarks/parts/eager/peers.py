"""The eager engine on a GPU against eager PyTorch and per-block checkpointing: time and memory at equal or less memory."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lib.gpu import clean, device_name, gradients, timed, worst_difference
from benchmarks.lib.results import commit, read_results
from benchmarks.lib.tables import eager
from benchmarks.models.peers import PEERS, Peer, checkpoint_blocks
from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call
from memfit.core.budget import Budget
from memfit.core.errors import MemfitError
from memfit.core.plan import Plan
from memfit.pipeline.choice import PlanSettings, choose_plan
from memfit.pipeline.costs import cost
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task
from memfit.report.progress import Progress
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(PEERS))
    parser.add_argument("--fractions", default="0.75,0.5,0.35", help="further budgets, as fractions of eager's activation bytes")
    parser.add_argument("--scale", type=float, default=1.0, help="batch size factor (small on a CPU)")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    parser.add_argument("--table", type=Path, help="print the table of a finished run's JSON lines and stop")
    parser.add_argument("--plan-seconds", type=float, default=8.0)
    parser.add_argument("--allow", default="recompute,variants", help="as memfit.fit's allow, separated by commas")
    parser.add_argument("--skip-checkpoint", action="store_true", help="leave out the per-block checkpointing baseline")
    args = parser.parse_args()
    if args.table:
        print("\n".join(eager({}, read_results(args.table)[1])))
        return
    if args.output is None:
        parser.error("--output FILE is needed (or --table FILE)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in args.models.split(","):
        for record in compare(PEERS[name], device, args):
            record |= {"model": name, "device": device_name(device), "torch": torch.__version__, "commit": commit(), "time": time.time()}
            print(json.dumps(record), flush=True)
            with args.output.open("a") as file:
                file.write(json.dumps(record) + "\n")


def compare(peer: Peer, device: str, args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    model = peer.build().to(device).train()
    inputs = peer.inputs(device, args.scale)
    targets = peer.targets(device, args.scale) or inputs
    parameter_bytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *inputs, *targets))

    def plain_step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=peer.autocast):
            loss: torch.Tensor = peer.loss(model(*inputs), *targets)
        loss.backward()
        return loss.detach()

    eager = timed(plain_step, model, device, parameter_bytes)
    yield {"what": "eager", **eager}
    reference = gradients(plain_step, model)
    yield from planned(peer, model, inputs, targets, device, parameter_bytes, eager, reference, args)
    if args.skip_checkpoint:
        return
    num_blocks = checkpoint_blocks(model, peer.blocks)
    checkpointed = timed(plain_step, model, device, parameter_bytes)
    yield {"what": "checkpoint per block", "blocks": num_blocks, **checkpointed}
    del model
    clean(device)
    model = peer.build().to(device).train()
    fractions: dict[str, int] = {"at checkpoint's memory": checkpointed["peak_bytes"]}
    yield from planned(peer, model, inputs, targets, device, parameter_bytes, eager, None, args, fractions)


def planned(
    peer: Peer,
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor, ...],
    device: str,
    parameter_bytes: int,
    eager: dict[str, Any],
    reference: list[torch.Tensor] | None,
    args: argparse.Namespace,
    budgets: dict[str, int] | None = None,
) -> Any:
    """memfit at several budgets; capture and costs are made once."""
    allow = tuple(args.allow.split(","))
    task = Task(model=model, loss_fn=peer.loss, num_targets=len(targets), allow=allow)
    call = Call.flatten((*inputs, *targets), {})
    begin = time.perf_counter()
    try:
        with torch.autocast(device, torch.bfloat16, enabled=peer.autocast):
            forms = list(Forms(task, call).usual())
        captured_s = time.perf_counter() - begin
        with Progress("costs") as progress:
            offers = [cost(form, task, progress) for form in forms]
        costs_s = time.perf_counter() - begin - captured_s
    except Exception as error:
        yield {"what": "memfit", "error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-1500:]}
        return
    if budgets is None:
        room = eager["peak_bytes"] - parameter_bytes
        budgets = {"keep all": 2**50} | {
            f"{float(f):.0%} of eager": parameter_bytes + int(room * float(f)) for f in args.fractions.split(",") if f
        }
    queue = [(label, budget, 0) for label, budget in budgets.items()]
    while queue:
        label, budget, tighter_by = queue.pop(0)
        begin = time.perf_counter()
        record = {
            "what": f"memfit {label}",
            "allow": args.allow,
            "budget_bytes": budget,
            "tighter_by": tighter_by,
            "capture_s": captured_s,
            "costs_s": costs_s,
            "ops": len(forms[0].captured.graph.ops),
        }
        settings = PlanSettings(time_limit_s=args.plan_seconds, compare_all="rounding" in allow)
        try:
            with Progress("plan") as progress:
                choice = choose_plan(offers, Budget(device_bytes=budget - tighter_by), settings, progress)
                captured, costs, plan = choice.form.captured, choice.form.costs, choice.plan
        except MemfitError as error:
            yield record | {"plan_s": time.perf_counter() - begin, "status": type(error).__name__, "reason": str(error)}
            continue
        record |= {
            "plan_s": time.perf_counter() - begin,
            "status": "planned",
            "planner": plan.planner,
            "variants": used_variants(captured, plan),
        }
        timeline = plan.timeline
        ready = Ready(
            captured=captured,
            costs=costs,
            plan=plan,
            program=generate(captured, plan.schedule),
            keep_all_peak_bytes=0,
            base_time_ns=0,
        )
        sources = (*model.parameters(), *model.buffers(), *call.tensors)

        def step(ready: Ready = ready, sources: tuple[torch.Tensor, ...] = sources) -> torch.Tensor:
            loss: torch.Tensor = run(Session(ready, sources, trial=False, replan=lambda _: None))
            loss.backward()
            return loss.detach()

        result = timed(step, model, device, parameter_bytes)
        if result.get("peak_bytes", 0) > budget and not tighter_by:  # the closed loop of memfit.fit: a miss re-plans tighter, once
            queue.insert(0, (label, budget, result["peak_bytes"] - timeline.peak_bytes))
        worst = None if reference is None else worst_difference(reference, gradients(step, model))
        yield record | {
            "predicted_peak_bytes": timeline.peak_bytes,
            "predicted_ms": timeline.time_ns / 1e6,
            "worst_gradient_difference": worst,
            **result,
        }
        del ready, step
        clean(device)


def used_variants(captured: Captured, plan: Plan) -> dict[str, int]:
    """Which other implementations a plan runs, and how often."""
    found: Counter[str] = Counter()
    for step in plan.schedule.computes:
        op = captured.graph.ops[step.op]
        if step.variant:
            found[f"{op.name} {op.variants[step.variant - 1].name}"] += 1
        elif captured.calls[step.op].role is Role.CALL and op.name.startswith("memfit.") and "cudnn" not in op.name:
            found[op.name] += 1
    return dict(found)
