"""Ten thousand steps as a long training has them: memory and step time must stay flat, and every hundredth gradient be the plain model's.

Shapes change from step to step, some batches are short, gradients are accumulated, a scheduler and evaluation run in between, some steps
are under autocast, a dropout rate changes, and now and then a step is interrupted in the middle and done again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from benchmarks.lib.results import HARDWARE, Row, path_of, provenance, read_results, save_results

SEED = 0
ROWS = (32, 48, 24, 64, 7)
COMPARED_EVERY, INTERRUPTED_EVERY, EVALUATED_EVERY, CHANGED_EVERY, AUTOCAST_EVERY = 100, 97, 50, 1000, 11
TEXT = """Each row is a tenth of the steps of one run. *step ms* is the median of a micro-step, *memory* what the process holds at the end of the part (resident
set; on a GPU what the allocator holds), *interrupted* are steps broken off in the middle of an op and done again, *compared* gradients against the
plain model's, *different* how many of those were not the same (in bits, or in double precision up to 1e-8 where regions are compiled)."""


class Net(nn.Module):
    """Normalization, dropout, attention, and a bank that forward reads and changes."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(dropout))
        self.mixing = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=dropout, batch_first=True)
        self.last = nn.Linear(width, 4)
        self.register_buffer("bank", torch.randn(width, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.mixing(h[:, None]).squeeze(1)
        near = (h @ self.bank.clone()).softmax(1)
        if self.training:
            self.bank.copy_(torch.roll(self.bank, 1, 1) * 0.99 + 0.01 * h.detach().mean(0)[:, None])
        return self.last(h) + near[:, :4]


class Interrupt(TorchDispatchMode):
    """Ctrl-C in the place of op number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class Soak:
    """One long training of a fitted model."""

    def __init__(self, device: str, engine: str, *, width: int = 32) -> None:
        torch.manual_seed(SEED)
        self.device, self.compiled = torch.device(device), engine == "inductor"
        dtype = torch.float64 if self.compiled else torch.float32
        self.model = Net(width, 0.0 if self.compiled else 0.1).to(self.device, dtype)  # compiled kernels draw other random numbers
        self.plain = copy.deepcopy(self.model)
        self.batches = [
            (torch.randn(rows, 16, dtype=dtype, device=self.device), torch.randint(0, 4, (rows,), device=self.device)) for rows in ROWS
        ]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 500)
        self.fitted = self._fit(engine)
        self.interrupted = self.compared = self.different = 0

    def _fit(self, engine: str) -> Any:
        """Nearer to the smallest budget of the step on the largest batch than to what it takes with everything kept."""
        x, y = max(self.batches, key=lambda batch: len(batch[0]))
        options: dict[str, Any] = {
            "loss_fn": nn.functional.cross_entropy,
            "example_targets": (y,),
            "optimizer": self.optimizer,
            "engine": engine,
        }
        needs = memfit.estimate(self.model, (x,), **{k: v for k, v in options.items() if k != "engine"})
        smallest = needs.smallest_bytes or needs.peak_bytes
        budget = smallest + (needs.peak_bytes - smallest) // 3 + 4096
        beside = 64 * 2**20 if self.device.type == "cuda" else 0  # for cuBLAS and the allocator, much more than this network
        return memfit.fit(self.model, (x,), budget=budget + beside, time_limit_s=5, **options)

    def part(self, first: int, count: int) -> Row:
        """Steps `first` and on."""
        before, times = (self.interrupted, self.compared, self.different), []
        for step in range(first, first + count):
            times += self._step(step)
        gc.collect()
        found = (self.interrupted, self.compared, self.different)
        names = ("interrupted", "compared", "different")
        row: Row = {"steps": f"{first + 1}-{first + count}", "step ms": round(1000 * median(times), 2), "memory MiB": self._memory_mib()}
        return row | {name: now - then for name, then, now in zip(names, before, found, strict=True)}

    def _memory_mib(self) -> float:
        if self.device.type == "cuda":
            return round(torch.cuda.memory_allocated() / 2**20, 2)
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
        return round(pages * resource.getpagesize() / 2**20, 1)

    def _step(self, step: int) -> list[float]:
        if step % CHANGED_EVERY == CHANGED_EVERY - 1 and not self.compiled:
            self.model.first[3].p = self.plain.first[3].p = 0.1 + 0.05 * (step // CHANGED_EVERY % 4)
        if step % EVALUATED_EVERY == 0:
            self._evaluate()
        times = [self._micro_step(step, micro) for micro in range(1 + step % 2)]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return times

    def _micro_step(self, step: int, micro: int) -> float:
        x, y = self.batches[(step + micro) % len(self.batches)]
        around = torch.autocast(self.device.type, torch.bfloat16) if step % AUTOCAST_EVERY == 0 and not self.compiled else nullcontext()
        expected = self._plain_gradients(x, y, around) if step % COMPARED_EVERY == 1 else None
        if step % INTERRUPTED_EVERY == 0 and micro == 0:
            self._interrupt(x, y, around, 3 + step // INTERRUPTED_EVERY % 60)
        began = time.perf_counter()
        with around:
            loss = self.fitted(x, y)
        loss.backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if expected is not None:
            self._compare(expected)
        return seconds

    def _interrupt(self, x: torch.Tensor, y: torch.Tensor, around: Any, at: int) -> None:
        """Broken off at an op of forward or backward; what is left must be as if it had not begun."""
        try:
            with Interrupt(at):
                with around:
                    loss = self.fitted(x, y)
                loss.backward()
        except KeyboardInterrupt:
            self.interrupted += 1
        self.optimizer.zero_grad()

    def _plain_gradients(self, x: torch.Tensor, y: torch.Tensor, around: Any) -> list[torch.Tensor]:
        """From the same weights, buffers, random numbers and gradients that are there already."""
        self.plain.load_state_dict(self.model.state_dict())
        for p, q in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), around:
            loss = nn.functional.cross_entropy(self.plain(x), y)
        loss.backward()
        return [p.grad for p in self.plain.parameters() if p.grad is not None]

    def _compare(self, expected: list[torch.Tensor]) -> None:
        self.compared += 1
        ours = [p.grad for p in self.model.parameters()]
        pairs = list(zip(ours, expected, strict=True))
        same = all(torch.allclose(a, b, rtol=1e-8, atol=1e-11) if self.compiled else torch.equal(a, b) for a, b in pairs if a is not None)
        self.different += not same

    def _evaluate(self) -> None:
        self.fitted.eval()
        with torch.no_grad():
            self.fitted(*self.batches[0])
        self.fitted.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--hardware", default=HARDWARE, help="in the name of the file of rows")
    parser.add_argument("--rows", type=Path, help="write the rows here instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak, rows = Soak(options.device, options.engine), []
    for part in range(10):
        count = options.steps // 10
        rows.append({"engine": options.engine, "device": options.device} | soak.part(part * count, count))
        print(rows[-1], file=sys.stderr, flush=True)
    path = options.rows or path_of("soak", options.hardware)
    columns = ["device", "engine", "steps", "step ms", "memory MiB", "interrupted", "compared", "different"]
    kept = [row for row in read_results(path)[1] if (row["device"], row["engine"]) != (options.device, options.engine)]
    about = {"title": "Ten thousand steps", "text": TEXT, "table": "columns", "columns": columns}
    save_results(path, about, [*kept, *({**provenance(SEED, ("torch",)), **row} for row in rows)])


if __name__ == "__main__":
    main()
