"""Every architecture that the rules find: is its step captured, are its gradients the plain model's, does it train in a third of its memory?

Each runs in a process of its own, forked from one that has imported the libraries, with a limit of memory and of time. The list is made by
rules before the first run; what fails stays in the table. Models whose configs cannot be made small by the rules are counted and named apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit
from benchmarks.lib.results import FOLDER, Row, path_of, provenance, read_results, save_results
from benchmarks.parts.census.architectures import make, names

SEED, SECONDS, BYTES = 0, 300, 6 << 30
COLUMNS = ("architecture", "verdict", "ops", "peak MiB", "a third", "of", "gradients", "by", "fit s", "why")
TEXT = """Small instances on two cores, eager engine, default options, dropout as the model has it, the loss inside where the model has one.
*Verdict*: SAME where two steps of the fitted model gave the plain model's loss and gradients (from the same random numbers): *bits*, or else the
largest difference as a share of the largest gradient; WRONG where that is above 1e-4; REFUSED where `fit` said in a sentence why it does not
take the model; CRASH for any other error; plain: the model's own two steps differ, so nothing can be said. *A third*: whether the steps ran, and
measured, inside a third *of* the plain step's peak where parameters and gradients leave room for that, else inside them and a third of the
rest (*activations*); *no*: memfit proved or found no plan, and compares gradients at the smallest budget it names, else without a limit. *by*: what
captured the step, Dynamo or memfit's own trace."""


def measure(name: str) -> Row:
    """One row; runs in the child."""
    made = _make(name)
    if isinstance(made, str):
        return {"verdict": "not made", "why": made}
    model, example, loss_fn, targets = made
    twins = (make(name)[0], make(name)[0])
    options: dict[str, Any] = {"engine": "eager", "time_limit_s": 3}
    if loss_fn is not None:
        options |= {"loss_fn": loss_fn, "example_targets": targets}
    began = time.perf_counter()
    try:
        whole = memfit.fit(model, example, budget="1TiB", planner="keep_all", **options)
    except memfit.MemfitError as refusal:
        return {"verdict": "REFUSED", "why": _one_line(refusal)}
    seconds = time.perf_counter() - began
    peak = whole.report().keep_all_peak_bytes
    row: Row = {"ops": len(whole.plan.schedule.steps), "peak MiB": round(peak / 2**20, 1), "fit s": round(seconds, 1)}
    budget, row["of"] = _third(model, example, peak)
    fitted: Any = whole
    try:
        fitted = memfit.fit(model, example, budget=budget, **options)
        row["a third"] = "yes"
    except (memfit.InfeasibleBudget, memfit.NoPlanFound) as refusal:
        row |= {"a third": "no", "why": _one_line(refusal)}
    return row | _compare(fitted, model, twins, (example, loss_fn, targets), budget if row["a third"] == "yes" else None)


def _make(name: str) -> Any:
    try:
        made = make(name)
        _step(made[0], *made[1:])
        made[0].zero_grad(set_to_none=True)
        return make(name)
    except Exception as error:
        return _one_line(error)


def _step(model: Any, example: Any, loss_fn: Any, targets: Any) -> torch.Tensor:
    """One of plain training."""
    torch.manual_seed(SEED)
    output = model(**example) if isinstance(example, dict) else model(*example)
    loss: torch.Tensor = output.loss if loss_fn is None else loss_fn(output, *targets)
    loss.backward()
    return loss.detach()


def _third(model: nn.Module, example: Any, peak: int) -> tuple[int, str]:
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    trained = {p.data_ptr(): p.nbytes for p in model.parameters() if p.requires_grad}
    fixed = sum(tensors.values()) + sum(trained.values())
    return (peak // 3, "peak") if 1.2 * fixed <= peak // 3 else (fixed + (peak - fixed) // 3, "activations")


def _compare(fitted: Any, model: nn.Module, twins: tuple[nn.Module, nn.Module], call: tuple[Any, Any, Any], budget: int | None) -> Row:
    """Two steps of each from the same start: the second one runs without the first one's check."""
    example, loss_fn, targets = call
    worst = 0.0
    by = "own trace" if getattr(fitted._memfit, "_latest", None) is getattr(fitted._memfit, "own", 0) else "Dynamo"
    for _ in range(2):
        expected, again = ((_step(twin, example, loss_fn, targets), _gradients(twin)) for twin in twins)
        if _differ(expected, again):
            return {"verdict": "plain", "by": by, "why": "two plain steps differ"}
        torch.manual_seed(SEED)
        output = fitted(**example) if isinstance(example, dict) else fitted(*example, *targets)
        loss = output.loss if loss_fn is None else output
        loss.backward()
        worst = max(worst, _differ(expected, (loss.detach(), _gradients(model))))
        for each in (model, *twins):
            each.zero_grad(set_to_none=True)
    measured = fitted.report().measured_peak_bytes
    row: Row = {"verdict": "SAME" if worst <= 1e-4 else "WRONG", "gradients": "bits" if worst == 0 else f"{worst:.0e}", "by": by}
    if budget is not None and (measured is None or measured > budget):
        row |= {"verdict": "OVER", "why": f"measured {measured} of {budget} bytes"}
    return row


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def _differ(ours: tuple[torch.Tensor, Any], theirs: tuple[torch.Tensor, Any]) -> float:
    """Zero for the same bits; else the largest difference, as a share of the largest gradient, and 1 at least where one is missing."""
    pairs = [(ours[0], theirs[0]), *zip(ours[1], theirs[1], strict=True)]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    there = [(a, b) for a, b in pairs if a is not None]
    if all(torch.equal(a, b) or ((a.isnan() == b.isnan()).all() and torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in there):
        return 0.0
    scale = max(float(b.abs().max()) for _, b in there[1:] if b.numel())
    worst = max(float((a - b).abs().max()) / (scale or 1.0) for a, b in there[1:] if a.numel())
    return max(worst, 1e-30) if worst == worst else float("inf")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, memfit.MemfitError) else f"{type(error).__name__}: {text}")[:220]


def run_apart(name: str) -> Row:
    """The row of one architecture, made by a child of this process."""
    read, write = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        signal.alarm(SECONDS)
        try:
            row = measure(name)
        except Exception as error:
            large = "can't allocate memory" in str(error)  # three instances of the model are in one process
            row = {
                "verdict": "not made" if large else "CRASH",
                "why": "above the census's own limit of memory" if large else _one_line(error),
            }
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    seconds = round(time.perf_counter() - began, 1)
    ended = "took too long" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else f"died with status {status}"
    row = json.loads(text) if text else {"verdict": "CRASH", "why": ended}
    return {"architecture": name, **row, "seconds": seconds}


def summary(rows: list[Row]) -> str:
    made = [row for row in rows if row["verdict"] != "not made"]
    counts = Counter(row["verdict"] for row in made)
    tried = [row for row in made if row.get("a third") in ("yes", "no")]
    third = sum(row["a third"] == "yes" for row in tried)
    unmade = len(rows) - len(made)
    return (
        f"**{len(made)} architectures: {', '.join(f'{n} {v}' for v, n in counts.most_common())}; {third} of {len(tried)} that were "
        f"captured train in a third.** {unmade} more could not be made small by the rules, or their plain step does not run."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="parts of names; all without")
    parser.add_argument("--rows", type=Path, help="write the rows here instead")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth, from the Kth on")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    every, count = map(int, options.part.split("/"))
    chosen = [n for n in names() if not options.patterns or any(p in n for p in options.patterns)][every::count]
    _import_libraries()
    path = options.rows or path_of("census")
    run = provenance(SEED, ("torch", "transformers", "timm", "torchvision"))
    kept = {row["architecture"]: row for row in read_results(path)[1]}
    for number, name in enumerate(chosen):
        row = run_apart(name)
        kept[name] = {**run, **dict.fromkeys(COLUMNS, ""), **row}
        print(f"{number + 1}/{len(chosen)}", {k: v for k, v in row.items() if v != ""}, file=sys.stderr, flush=True)
        order = {name: k for k, name in enumerate(names())}
        rows = sorted(kept.values(), key=lambda row: order.get(row["architecture"], len(order)))
        about = {"title": "Census of architectures", "text": f"{TEXT}\n\n{summary(rows)}", "table": "columns", "columns": list(COLUMNS)}
        save_results(path, about, rows)
    print(f"Wrote {path.relative_to(FOLDER.parent.parent) if path.is_relative_to(FOLDER) else path}", file=sys.stderr)


def _import_libraries() -> None:
    """Before forking, so that each child need not."""
    from benchmarks.models.torchvision_ops import declare_missing_ops

    declare_missing_ops()
    import timm  # noqa: F401
    import torchvision  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
