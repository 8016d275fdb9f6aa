"""Situations around `fit`: everything a model depends on is changed, one thing at a time; fitted training against plain training."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import memfit
from benchmarks.lib.results import provenance, write_results
from benchmarks.parts.guards.arguments import argument_situations
from benchmarks.parts.guards.changes import Change, changes_of
from benchmarks.parts.guards.subjects import SUBJECTS, Case, make_case
from memfit.core.errors import MemfitError

STEPS, SEED, RATE = 4, 0, 0.01
_ALARM = "the planned step differs from the plain model"
TEXT = """Every situation is a model, a change and a moment. The changes are generated from what the model's own structure offers: each plain
attribute of each kind of module set to another value of its type, lists and dictionaries and dataclasses changed inside, hooks, patched methods,
swapped modules and classes, each parameter and buffer replaced, frozen, re-laid or parametrized, globals, closures, environment, default type,
autocast, and values of arguments; none is picked by hand for a model. Four steps of training are compared with the plain model's: losses, gradients,
buffers, the Python attributes that forward writes, random streams, and what `fit` itself leaves behind. SAME: equal, bit for bit or within
rounding (or both raise); compiled 1e-4, and a fifth under autocast, where one activation may be on in one and off in the other. REFUSED: an error of
memfit's that says why. WRONG: other numbers without a word. ALARM: the check of the first step stops a step that is right. CRASH: an error that is
nobody's. *before* is the commit before guards existed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    subject: str
    change: Change
    when: int  # the step before which it happens
    make: Callable[[], Case]

    @property
    def name(self) -> str:
        return f"{self.subject} | {self.change.name} | before step {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What training left: a record per step, and the error that ended it."""

    records: list[dict[str, Any]]
    error: BaseException | None


def situations() -> Iterator[Situation]:
    for subject in SUBJECTS:
        for number, change in enumerate(changes_of(make_case(subject).model)):
            yield Situation(subject=subject, change=change, when=number % 3, make=lambda s=subject: make_case(s))
    for label, make, change in argument_situations():
        yield Situation(subject=label, change=change, when=1, make=make)


_DROPS = (".p set", ".dropout set")


def without_dropout(situation: Situation) -> Situation:
    """For compiled kernels, which draw other random numbers."""

    def make() -> Case:
        case = situation.make()
        for module in case.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        return case

    return replace(situation, make=make)


def train(situation: Situation, fit: Callable[[Case], Any] | None) -> Outcome:
    """Plain training where `fit` is None."""
    case = situation.make()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    records: list[dict[str, Any]] = []
    undo: Any = None
    try:
        root = case.model if fit is None else fit(case)
        records.append({"python": _python_state(case.model), **_tensors(case.model), **_streams()})
        for step in range(STEPS):
            if step == situation.when:
                undo = situation.change.apply(case, root)
            records.append(_step(case, root, fit is not None, step))
        records.append(_streams())
        return Outcome(records=records, error=None)
    except Exception as error:
        return Outcome(records=records, error=error)
    finally:
        if isinstance(undo, (types.FunctionType, types.MethodType)):
            undo()


def _step(case: Case, root: Any, is_fitted: bool, step: int) -> dict[str, Any]:
    x, y = case.batch(step)
    loss = root(x, *case.extra, y) if is_fitted else case.loss_fn(root(x, *case.extra), y)
    (loss if loss.dim() == 0 else loss.sum()).backward()
    record = {"loss": loss.detach().clone(), "python": _python_state(case.model)}
    record.update({f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in case.model.named_parameters()})
    with torch.no_grad():
        for p in case.model.parameters():
            if p.grad is not None:
                p -= RATE * p.grad
            p.grad = None
    record.update(_tensors(case.model))
    return record


def _tensors(model: nn.Module) -> dict[str, Any]:
    return {n: b.detach().clone() for n, b in (*model.named_buffers(), *model.named_parameters())}


def _streams() -> dict[str, Any]:
    return {
        "torch's random stream": torch.get_rng_state(),
        "python's random stream": random.getstate(),
        "numpy's random stream": str(np.random.get_state()),
    }


def _python_state(model: nn.Module) -> dict[str, Any]:
    """Plain attributes by their text, tensors among them by their values."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                plain = isinstance(value, torch.Tensor)
                found[f"{path}.{name}"] = (
                    str(value.detach().tolist())
                    if plain
                    else f"function {value.__name__}"
                    if callable(value) and hasattr(value, "__name__")
                    else value
                    if isinstance(value, float)
                    else repr(value)
                )
    return found


def find_difference(plain: Outcome, fitted: Outcome, tolerance: float) -> str:
    """The first thing that differs, empty if nothing does."""
    for step, (a, b) in enumerate(zip(plain.records, fitted.records, strict=False)):
        for key in a.keys() | b.keys():
            if not _equal(a.get(key), b.get(key), tolerance):
                return f"{key}, {'after fit' if step == 0 else f'step {step - 1}'}"
    return ""


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k], tolerance) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance * abs(a)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance * _scale(a), equal_nan=True)


def _scale(a: torch.Tensor) -> float:
    finite = a[a.isfinite()].double().abs() if a.is_floating_point() else a.double().abs()
    return max(float(finite.max()), 0.05) if finite.numel() else 1.0


def judge(plain: Outcome, fitted: Outcome, tolerance: float) -> tuple[str, str]:
    """(verdict, what is behind it)."""
    error = fitted.error
    if isinstance(error, MemfitError):
        kind = "ALARM" if str(error).startswith(_ALARM) else "REFUSED"
        if plain.error is None or kind == "REFUSED":
            return kind, str(error)[:200]
    if error is not None and plain.error is None:
        return "CRASH", f"{type(error).__name__}: {str(error)[:160]}"
    difference = find_difference(plain, fitted, tolerance)
    if difference or (error is None) != (plain.error is None):
        return "WRONG", difference or f"silent where plain raises {type(plain.error).__name__}"
    return "SAME", "" if error is None else f"both raise {type(plain.error).__name__}"


def fit_eager(case: Case) -> Any:
    x, y = case.batch(0)
    return memfit.fit(case.model, (x, *case.extra), budget="1GiB", loss_fn=case.loss_fn, example_targets=(y,))


def fit_compiled(case: Case) -> Any:
    x, y = case.batch(0)
    return memfit.fit(case.model, (x, *case.extra), budget="1GiB", loss_fn=case.loss_fn, example_targets=(y,), engine="inductor")


def run(situation: Situation, engine: str = "eager") -> dict[str, Any]:
    """A row of the table."""
    began = time.perf_counter()
    plain = train(situation, None)
    fitted = train(situation, fit_eager if engine == "eager" else fit_compiled)
    rounding = situation.change.rounding if engine == "eager" else max(20 * situation.change.rounding, 1e-4)
    verdict, why = judge(plain, fitted, rounding)
    return {
        "subject": situation.subject,
        "change": situation.change.name,
        "step": situation.when,
        "engine": engine,
        "verdict": verdict,
        "why": why,
        "seconds": round(time.perf_counter() - began, 2),
    }


def summarize(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(Counter(row["verdict"] for row in rows).items()))


COLUMNS = ("subject", "change", "step", "engine", "before", "verdict", "why")


def read_rows(path: str) -> list[dict[str, Any]]:
    with open(path) as file:
        return [json.loads(line) for line in file]


def write_page(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """`before`: rows of the same situations at an earlier commit, for the verdicts there."""
    known = {(r["subject"], r["change"], r["engine"]): r["verdict"] for r in before}
    shown = [{**row, "before": known.get((row["subject"], row["change"], row["engine"]), "not run")} for row in rows]
    counts = f"{TEXT}\n\n**{len(rows)} situations: {summarize(rows)}.** Before: {summarize([{'verdict': r['before']} for r in shown])}."
    write_results("situations", title="Situations around fit", text=counts, columns=COLUMNS, rows=shown, run=provenance(SEED, ("torch",)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", default="", help="only subjects whose name begins so")
    parser.add_argument("--change", default="", help="only changes whose name has this in it")
    parser.add_argument("--every", type=int, default=1, help="each n-th situation only")
    parser.add_argument(
        "--engine", choices=["eager", "inductor"], default="eager", help="compiled: without dropout, whose numbers are others"
    )
    parser.add_argument("--rows", help="add rows to this file as they come, and write no page")
    parser.add_argument("--page", help="run nothing: write the page from a file of rows")
    parser.add_argument("--before", help="rows of an earlier commit, for --page")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(read_rows(arguments.page), read_rows(arguments.before) if arguments.before else [])
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [s for s in situations() if s.subject.startswith(arguments.subject) and arguments.change in s.change.name][:: arguments.every]
    rows = []
    if arguments.engine == "inductor":
        chosen = [without_dropout(s) for s in chosen if not s.change.name.endswith(_DROPS)]
    for number, situation in enumerate(chosen):
        rows.append(row := run(situation, arguments.engine))
        print(f"{number + 1}/{len(chosen)} {row['verdict']:8}{situation.name} {row['why'][:110]}", file=sys.stderr, flush=True)
        if arguments.rows:
            with open(arguments.rows, "a") as file:
                file.write(json.dumps(row) + "\n")
    print(summarize(rows), file=sys.stderr)
    if not arguments.rows:
        write_page(rows, [])


if __name__ == "__main__":
    main()
