"""Every model of the zoo at four budgets: exact gradients, predicted against measured peak of the whole step, time.

    python benchmarks/eager.py zoo                      all models; raw rows are appended as they come, the table is written last
    python benchmarks/eager.py zoo --models gpt2 vgg16  some of them; their old rows are replaced

Bytes. *fixed* is what the training holds whatever the plan: parameters, buffers, inputs, targets, AdamW's state and one
set of gradients. *keep-all* is the peak of the whole step (forward, backward, optimizer step) without recomputation.
The budget at p % is fixed + p % of (keep-all - fixed). *Measured* is what is really held before the second step plus
the most bytes that all allocations from its forward to the end of its optimizer step add.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.lib.pages import write_pages
from benchmarks.lib.results import command, commit, path_of, read_results, save_results
from benchmarks.models.zoo import ZOO, make
from memfit.capture.inputs import Call, Inputs
from memfit.core.budget import Budget
from memfit.core.errors import MemfitError, NoPlanFound
from memfit.core.graph import Kind
from memfit.core.outcome import Status
from memfit.core.plan import Plan
from memfit.pipeline.costs import cost
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task
from memfit.planning import plan as find_plan
from memfit.report.progress import Progress
from memfit.runtime.autograd_step import Ready
from memfit.runtime.closed_loop import Stepper
from memfit.runtime.codegen import generate
from memfit.runtime.fitted import fit_module
from memfit.torch_private.allocations import meter, peaks_of

PATH = path_of("model_matrix")
_TEXT = f"""**Bytes.** {(__doc__ or "").split("Bytes.")[1].strip()}

Seed 0, AdamW, planner `auto`, 6 s for each budget unless a command says otherwise. Times are the fastest of three steps each, plain and
fitted in turns; other work ran on the machine, so single time ratios are noise."""
ABOUT = {"title": "Model matrix: CPU, eager engine", "text": _TEXT, "table": "zoo"}
PERCENTS = (100, 75, 50, 35)
CPU = torch.device("cpu")


class Trainer:
    """A model with its optimizer, inputs and loss; `step` is one whole training step."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], inputs: Inputs, targets: tuple[Any, ...]) -> None:
        self.model, self.call, self.inputs, self.targets = model, call, inputs, targets
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.loss = self.random = torch.zeros(())

    def gradients(self) -> None:
        loss = self.call(*self.inputs.args, *self.targets, **self.inputs.kwargs)
        loss.backward()
        self.loss, self.random = loss.detach(), torch.get_rng_state()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.call(*self.inputs.args, *self.targets, **self.inputs.kwargs).backward()
        self.finish()

    def held_bytes(self) -> int:
        """What is there between steps, each storage once."""
        tensors: list[Any] = [*self.model.parameters(), *self.model.buffers(), *(p.grad for p in self.model.parameters())]
        tensors += tree_leaves((self.inputs.args, self.inputs.kwargs, self.targets, [dict(s) for s in self.optimizer.state.values()]))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}
        return sum(storages.values())


class Subject:
    """A model of the zoo, captured and profiled once; `fitted(budget)` and `plain()` start from the same weights every time."""

    def __init__(self, name: str) -> None:
        self.name = name
        model, inputs, self.loss_fn, self.targets = make(name)
        self.inputs = Inputs.of(inputs)
        self.task = Task(
            model=model, loss_fn=self.loss_fn, num_targets=len(self.targets), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
        )
        self.call = Call.flatten((*self.inputs.args, *self.targets), self.inputs.kwargs)
        begin = time.perf_counter()
        form = next(Forms(self.task, self.call).usual())
        self.capture_s = round(time.perf_counter() - begin, 2)
        costed = cost(form, self.task, Progress("matrix"))
        self.captured, self.costs, self.free = costed.captured, costed.costs, costed.keep_all

    def sizes(self) -> dict[str, Any]:
        graph = self.captured.graph
        lasting = {graph.storage_of(t) for t in graph.sources} | {s.id for s in graph.storages if s.kind is Kind.GRADIENT}
        fixed = sum(graph.storages[s].size_bytes for s in lasting)
        return {
            "fixed_bytes": fixed,
            "keep_all_bytes": self.free.timeline.peak_bytes,
            "num_ops": len(graph.ops),
            "capture_s": self.capture_s,
        }

    def plain(self) -> Trainer:
        model, *_ = make(self.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.loss_fn(model(*args[: len(args) - len(self.targets)], **kwargs), *self.targets)

        return Trainer(model, call, self.inputs, self.targets)

    def fitted(self, plan: Plan) -> Trainer:
        """What memfit.fit makes of this plan, without capturing again."""
        model, *_ = make(self.name)
        free = self.free.timeline
        ready = Ready(
            captured=self.captured,
            plan=plan,
            costs=self.costs,
            program=generate(self.captured, plan.schedule),
            keep_all_peak_bytes=free.peak_bytes,
            base_time_ns=free.compute_time_ns,
        )

        def prepare(args: Any, kwargs: Any, *, accumulates: bool, tighter_by: int) -> Ready:
            if accumulates or tighter_by:
                raise NoPlanFound("the matrix runs one plan: a second, tighter one would hide a miss.")
            return ready

        stepper = Stepper(
            model, prepare, loss_fn=self.loss_fn, num_targets=len(self.targets), check=False, meter=meter, flatten=Call.flatten
        )
        return Trainer(model, fit_module(model, stepper), self.inputs, self.targets)


# -- one row -----------------------------------------------------------------------------------------------------------


def row(subject: Subject, percent: int, known: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
    budget = known["fixed_bytes"] + (known["keep_all_bytes"] - known["fixed_bytes"]) * percent // 100
    outcome = find_plan(subject.captured.graph, subject.costs, Budget(device_bytes=budget), time_limit_s=time_limit_s)
    found: dict[str, Any] = {
        "model": subject.name,
        "percent": percent,
        "budget_bytes": budget,
        **known,
        "plan_s": round(outcome.seconds, 2),
        "verdict": str(outcome.status),
        "minimum_bytes": outcome.lower_bound_bytes,
        "gap_fraction": outcome.gap_fraction,
    }
    if outcome.plan is None:
        return {**found, "status": "infeasible" if outcome.status is Status.INFEASIBLE else "no plan", "reason": outcome.reason}
    trainer, plain = subject.fitted(outcome.plan), subject.plain()
    found.update(compare(plain, trainer))
    held = trainer.held_bytes()
    left, peak = peaks_of(trainer.step, CPU)
    base = subject.free.timeline.compute_time_ns
    found.update(
        predicted_bytes=outcome.plan.timeline.peak_bytes,
        measured_bytes=held + peak,
        left_bytes=left,
        predicted_overhead_fraction=outcome.plan.timeline.compute_time_ns / base - 1,
        time_ratio=time_ratio(plain, trainer),
    )
    return {**found, "status": verdict(found)}


def compare(plain: Trainer, fitted: Trainer, steps: int = 2) -> dict[str, Any]:
    """Both train from the same weights and seed; every gradient, loss and buffer and the random stream are compared."""
    worst, where = 0.0, ""
    for k in range(steps):
        for trainer in (plain, fitted):
            torch.manual_seed(100 + k)
            trainer.gradients()
        for label, ours, theirs in pairs(plain, fitted):
            difference = relative(ours, theirs)
            if difference > worst:
                worst, where = difference, f"step {k}, {label}"
        for trainer in (plain, fitted):
            trainer.finish()
    return {"bitwise": worst == 0.0, "worst_difference": worst, "worst_where": where}


def pairs(plain: Trainer, fitted: Trainer) -> Iterable[tuple[str, Any, Any]]:
    yield "loss", fitted.loss, plain.loss
    yield "random stream", fitted.random, plain.random
    for (name, a), (_, b) in zip(fitted.model.named_parameters(), plain.model.named_parameters(), strict=True):
        yield f"gradient of {name}", a.grad, b.grad
    for (name, a), (_, b) in zip(fitted.model.named_buffers(), plain.model.named_buffers(), strict=True):
        yield f"buffer {name}", a, b


def relative(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """Largest difference over largest magnitude; infinite when one is missing or not a number."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    if torch.equal(ours, theirs):
        return 0.0
    scale = max(theirs.double().abs().max().item(), 1e-30)
    found = (ours.double() - theirs.double()).abs().max().item() / scale
    return found if found == found else float("inf")


def time_ratio(plain: Trainer, fitted: Trainer, repeats: int = 3) -> float:
    """Fastest of several steps each, taken in turns: other work on the machine hits both."""
    best = {id(plain): float("inf"), id(fitted): float("inf")}
    for _ in range(repeats):
        for trainer in (plain, fitted):
            begin = time.perf_counter()
            trainer.step()
            best[id(trainer)] = min(best[id(trainer)], time.perf_counter() - begin)
    return round(best[id(fitted)] / best[id(plain)], 3)


def verdict(found: dict[str, Any]) -> str:
    if found["worst_difference"] > 1e-4:
        return "wrong"
    if found["measured_bytes"] > found["budget_bytes"]:
        return "above budget"
    return "works"


# -- all of it ---------------------------------------------------------------------------------------------------------


def run(models: list[str], time_limit_s: float) -> None:
    rows = [r for r in read_results(PATH)[1] if r["model"] not in models]
    setting = {"commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(), "seed": 0, "command": command()}
    for name in models:
        try:
            subject = Subject(name)
        except MemfitError as error:
            rows.append({"model": name, "percent": 0, "status": "refused", "reason": str(error), **setting})
            print(f"{name:20} refused: {error}", file=sys.stderr, flush=True)
            continue
        known = subject.sizes()
        for percent in PERCENTS:
            gc.collect()
            try:
                found = row(subject, percent, known, time_limit_s)
            except Exception as error:
                found = {"model": name, "percent": percent, **known, "status": "error", "reason": f"{type(error).__name__}: {error}"}
            rows.append({**found, **setting})
            print(line(found), file=sys.stderr, flush=True)
            save(rows)
    write_pages()
    print(f"Wrote {PATH}", file=sys.stderr)


def save(rows: list[dict[str, Any]]) -> None:
    order = {name: k for k, name in enumerate(ZOO)}
    save_results(PATH, ABOUT, sorted(rows, key=lambda r: (order.get(r["model"], 99), -r["percent"])))


def line(found: dict[str, Any]) -> str:
    if "measured_bytes" not in found:
        return f"{found['model']:20} {found['percent']:4} {found['status']}: {found.get('reason', '')[:160]}"
    miss = found["measured_bytes"] / found["predicted_bytes"] - 1
    return (
        f"{found['model']:20} {found['percent']:4} {found['status']:8} bitwise {found['bitwise']!s:5} ({found['worst_difference']:.0e}) "
        f"budget {found['budget_bytes']:>11,} predicted {found['predicted_bytes']:>11,} measured {miss:+.2%} time {found['time_ratio']:.2f} "
        f"(planned {1 + found['predicted_overhead_fraction']:.2f}) plan {found['plan_s']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(ZOO), default=list(ZOO), metavar="MODEL")
    parser.add_argument("--time-limit-s", type=float, default=6, help="planning time for each budget")
    parser.add_argument("--threads", type=int, default=1, help="more than one waits for others on a shared machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    run(options.models, options.time_limit_s)
