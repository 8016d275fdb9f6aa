"""One linear head with its loss in every form that libraries write: the least budget with today's passes and without losses in rows.

On the CPU, eager engine; the list was made before the first run, and what fails stays in the table.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import memfit
from benchmarks.lib.results import Row, provenance, write_results
from memfit.passes.table import PIPELINE

WORDS, WIDTH, ROWS, SEED = 8_003, 64, 1_024, 0
TEXT = f"""A linear layer, tanh and a head of {WORDS:,} words, {ROWS:,} rows, fp32, eager engine, on two cores. *Before* and *least* are the smallest budgets
that are not proven impossible, without and with `losses-in-rows`, in MiB and as shares of the plain step's peak. *Measured*: what a step held that was
fitted in 1.03 of the least. *Worst*: the largest difference of a gradient there, against the largest gradient; *loss*: the difference of the loss."""

cross = functional.cross_entropy
Loss = Callable[[torch.Tensor, torch.Tensor, "Head"], Any]


class Head(nn.Module):
    """`loss` makes of (batch, length, words) and (batch, length) what the model returns."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("shift", torch.linspace(-1, 1, WORDS)[None])
        self.register_buffer("weights", torch.linspace(0.5, 1.5, WORDS))
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.body(x))), labels, self)


def flat(y: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y.view(-1, WORDS), labels.view(-1)


def shifted(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    return cross(y[..., :-1, :].contiguous().view(-1, WORDS), labels[..., 1:].contiguous().view(-1))


def masked(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    rows, words = flat(y, labels)
    return (cross(rows, words, reduction="none") * (words > 3)).sum() / 100


def soft(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    rows, words = flat(y, labels)
    wanted = torch.zeros_like(rows).scatter_(1, words.clamp(min=0)[:, None], 0.9) + 0.1 / WORDS
    return -(wanted * rows.log_softmax(1)).sum(1).mean()


def gathered(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    rows, words = flat(y, labels)
    return (torch.logsumexp(rows, -1) - rows.gather(1, words.clamp(min=0)[:, None])[:, 0]).mean()


def indexed(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    rows, words = flat(y, labels)
    return -rows.log_softmax(1)[torch.arange(len(rows)), words.clamp(min=0)].mean()


def focal(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    losses = cross(*flat(y, labels), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def margin(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    rows, words = flat(y.tanh(), labels.clamp(min=0))
    chosen = torch.zeros_like(rows).scatter_(1, words[:, None], 1.0)
    return cross(5 * (rows - 0.2 * chosen), words)


def smoothed_by_a_trainer(y: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    """As the `LabelSmoother` of transformers."""
    log_p, words, padding = -y.log_softmax(-1), labels.clamp(min=0)[..., None], labels.eq(-100)[..., None]
    losses = log_p.gather(-1, words).masked_fill(padding, 0.0)
    rest = log_p.sum(-1, keepdim=True, dtype=torch.float32).masked_fill(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * losses.sum() / count + 0.1 * rest.sum() / (count * WORDS)


FORMS: dict[str, Loss] = {
    "cross entropy": lambda y, t, head: cross(*flat(y, t)),
    "soft cap": lambda y, t, head: cross(*flat(30 * torch.tanh(y / 30), t)),
    "label smoothing": lambda y, t, head: cross(*flat(y, t), label_smoothing=0.1),
    "label smoothing of a trainer": smoothed_by_a_trainer,
    "class weights": lambda y, t, head: cross(*flat(y, t), weight=head.weights),
    "weights and smoothing": lambda y, t, head: cross(*flat(y, t), weight=head.weights, label_smoothing=0.1),
    "logits shifted and copied": shifted,
    "a loss for each row, masked": masked,
    "z-loss": lambda y, t, head: cross(*flat(y, t)) + 1e-4 * torch.logsumexp(flat(y, t)[0], -1).pow(2).mean(),
    "accuracy inside": lambda y, t, head: (cross(*flat(y, t)), (y.argmax(-1) == t).float().mean()),
    "[N, V, T] targets": lambda y, t, head: cross(y.transpose(1, 2), t),
    "soft targets": soft,
    "gather less logsumexp": gathered,
    "indexed by rows": indexed,
    "an added buffer": lambda y, t, head: cross(*flat(y + head.shift, t)),
    "a learned temperature": lambda y, t, head: cross(*flat(y / head.scale, t)),
    "focal": focal,
    "margin": margin,
    "a penalty on the mean of rows": lambda y, t, head: cross(*flat(y, t)) + y.mean((0, 1)).square().sum(),
}


@contextmanager
def without_rows() -> Iterator[None]:
    """As it was before: `losses-in-rows` left out."""
    known = dict(PIPELINE)
    PIPELINE.update({engine: tuple(s for s in slots if s.rewrite.name != "losses-in-rows") for engine, slots in known.items()})
    try:
        yield
    finally:
        PIPELINE.update(known)


def measure(name: str, batch: int) -> Row:
    began = time.perf_counter()
    try:
        row = _measure(FORMS[name], batch)
    except Exception as error:
        row = {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"}
    return {"loss": name, "batch": batch, **row, "seconds": round(time.perf_counter() - began, 1)}


def _measure(loss: Loss, batch: int) -> Row:
    torch.manual_seed(SEED)
    plain = Head(loss)
    x, labels = torch.randn(batch, ROWS // batch, WIDTH), torch.randint(0, WORDS, (batch, ROWS // batch))
    labels[:, :3] = -100
    options: dict[str, Any] = {"engine": "eager", "time_limit_s": 10}
    free: Any = memfit.fit(copy.deepcopy(plain), (x, labels), budget="1TiB", planner="keep_all", **options)
    peak = free.report().keep_all_peak_bytes
    with without_rows():
        before = _least(plain, (x, labels))
    least = _least(plain, (x, labels))
    row: Row = {
        "peak MiB": round(peak / 2**20, 1),
        "before": f"{before / 2**20:.1f} ({before / peak:.2f})",
        "least": f"{least / 2**20:.1f} ({least / peak:.2f})",
    }
    model, budget = copy.deepcopy(plain), int(1.03 * least)
    try:
        fitted: Any = memfit.fit(model, (x, labels), budget=budget, **options)
    except memfit.MemfitError as refusal:
        return row | {"why": f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:150]}"}
    for _ in range(2):
        model.zero_grad()
        found = _first(fitted(x, labels))
        found.backward()
    expected = _first(plain(x, labels))
    expected.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    if any((a is None) != (b is None) for a, b in pairs):
        return row | {"why": "WRONG: a gradient that is there in one and not in the other"}
    scale = max(float(b.abs().max()) for _, b in pairs if b is not None)
    worst = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None) / scale
    report = fitted.report()
    inside = report.measured_peak_bytes is not None and report.measured_peak_bytes <= budget
    return row | {
        "measured": round(report.measured_peak_bytes / 2**20, 1),
        "worst": f"{worst:.0e}",
        "difference": f"{abs(float(found - expected)):.0e}",
        "why": ("" if inside and worst < 1e-5 else "WRONG: ") + "; ".join(note.split(":")[0] for note in report.notes),
    }


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _least(model: Any, example: tuple[torch.Tensor, ...]) -> int:
    try:
        memfit.fit(copy.deepcopy(model), example, budget=1, engine="eager", time_limit_s=5)
    except memfit.InfeasibleBudget as refusal:
        return refusal.minimum_bytes or 0
    raise AssertionError("a plan in one byte")


COLUMNS = ("loss", "batch", "peak MiB", "before", "least", "measured", "worst", "difference", "why", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="*", choices=list(FORMS), default=list(FORMS), help="all without")
    parser.add_argument("--batch", nargs="*", type=int, default=[8, 2], help="sequences that the rows come from")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for batch in options.batch:
        for name in options.losses:
            rows.append(dict.fromkeys(COLUMNS, "") | measure(name, batch))
            print(rows[-1], file=sys.stderr, flush=True)
    run = provenance(SEED, ("torch",))
    write_results("loss_forms", title="Forms of losses", text=TEXT, columns=COLUMNS, rows=rows, run=run)


if __name__ == "__main__":
    main()
