"""Batches padded to another length each: what a new length costs a fitted language model, one capture for all lengths against one for each.

Processor seconds of one thread, on the CPU, eager engine; at every tenth length loss and gradients are held against the plain model's bits.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
import warnings
from typing import Any

import torch

import memfit
from benchmarks.lib.results import Row, provenance, write_results
from benchmarks.models.torchvision_ops import declare_missing_ops

WORDS, ROWS, SHORTEST, LONGEST, SEED = 8_003, 4, 24, 224, 0
SIZE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": WORDS}
GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": LONGEST, "vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
MODELS = {"GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2), "Llama": ("LlamaForCausalLM", "LlamaConfig", SIZE)}
TEXT = f"""transformers models given labels, four layers 256 wide, {WORDS:,} words, {ROWS} rows of {SHORTEST} to {LONGEST} tokens, another length at
each step in random order, the last batch of three rows; `fit` at the first of them. *A new length* is what is done for it before its first step;
*share* is that of all steps but the first two, which capture. *One capture*: sizes left open from the second length on; *one for each*: as
before, on fewer lengths. Processor seconds of one thread on a machine with other work."""
COLUMNS = (
    *("model", "budget", "captures", "lengths", "fit s", "second length s", "a new length ms", "9 of 10 ms", "most ms", "step ms"),
    *("share", "same bits", "over budget"),
)


class Clock:
    """Processor seconds that a fitted model spends on plans."""

    def __init__(self, fitted: Any, *, open_sizes: bool) -> None:
        self.seconds = 0.0
        guarded = fitted._memfit
        self._plain = {name: getattr(guarded, name) for name in ("_open", "_captured")}
        for name in self._plain if open_sizes else ("_captured",):
            setattr(guarded, name, self._timed(self._plain[name]))
        if not open_sizes:
            guarded._leaves_open = lambda: False

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.process_time() - begin

        return timed

    def step(self, fitted: Any, size: tuple[int, int]) -> tuple[float, float]:
        """One step: seconds of plans, and of the rest."""
        before = self.seconds
        whole = step_s(fitted, size)
        return self.seconds - before, whole - (self.seconds - before)


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(1000 * rows + length))
    mask = torch.ones_like(tokens)
    mask[0, length // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def make(name: str) -> Any:
    declare_missing_ops()
    import transformers

    model, config, options = MODELS[name]
    torch.manual_seed(SEED)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


def sizes_of(num_lengths: int) -> list[tuple[int, int]]:
    lengths = random.Random(SEED).sample(range(SHORTEST, LONGEST + 1), num_lengths)
    return [*((ROWS, length) for length in lengths), (3, lengths[-1])]


def step_s(fitted: Any, size: tuple[int, int]) -> float:
    data = batch(*size)
    torch.manual_seed(size[1])
    begin = time.process_time()
    fitted(**data).loss.backward()
    return time.process_time() - begin


def has_same_bits(plain: Any, fitted: Any, size: tuple[int, int]) -> bool:
    for model in (plain, fitted):
        model.zero_grad()
        step_s(model, size)
    pairs = zip(plain.parameters(), fitted.parameters(), strict=True)
    return all(p.grad is q.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs)


def measure(name: str, num_lengths: int, share_of_peak: float | None, *, open_sizes: bool) -> Row:
    plain = make(name)
    model, sizes = copy.deepcopy(plain), sizes_of(num_lengths)
    budget = budget_of(name, share_of_peak)
    begin = time.process_time()
    fitted = memfit.fit(model, batch(*sizes[0]), budget=budget, engine="eager", time_limit_s=10)
    fit_s = time.process_time() - begin
    clock, taken, over, same = Clock(fitted, open_sizes=open_sizes), [], 0, True
    for number, size in enumerate(sizes):
        model.zero_grad()
        taken.append(clock.step(fitted, size))
        measured = fitted.report().measured_peak_bytes
        over += measured is not None and measured > budget
        if number % 10 == 0:
            same = same and has_same_bits(plain, fitted, size)
    plans = sorted(plan * 1e3 for plan, _ in taken[2:])
    return {
        "model": name,
        "budget": "all" if share_of_peak is None else f"{share_of_peak:g} of the peak",
        "captures": "one" if open_sizes else "one for each",
        "lengths": num_lengths,
        "fit s": round(fit_s, 1),
        "second length s": round(taken[1][0], 1),
        "a new length ms": round(statistics.median(plans)),
        "9 of 10 ms": round(plans[len(plans) * 9 // 10]),
        "most ms": round(plans[-1]),
        "step ms": round(statistics.median(rest for _, rest in taken[2:]) * 1e3),
        "share": f"{sum(plans) / 1e3 / sum(map(sum, taken[2:])):.0%}",
        "same bits": "yes" if same else "NO",
        "over budget": over,
    }


def budget_of(name: str, share_of_peak: float | None) -> int:
    """A share of what the longest batch takes with everything kept."""
    if share_of_peak is None:
        return 2**40
    whole = memfit.fit(make(name), batch(ROWS, LONGEST), budget=2**40, engine="eager", planner="keep_all", check=False)
    return int(whole.report().predicted_peak_bytes * share_of_peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="all without")
    parser.add_argument("--lengths", type=int, default=200)
    parser.add_argument("--before", type=int, default=8, help="lengths with a capture for each")
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.5], help="shares of the peak, beside a budget that holds all")
    parser.add_argument("--tight", type=int, default=60, help="lengths in those budgets")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in options.models:
        runs = [(options.before, None, False), (options.lengths, None, True), *((options.tight, share, True) for share in options.budgets)]
        for number, share, open_sizes in runs:
            rows.append(measure(name, number, share, open_sizes=open_sizes))
            print(rows[-1], file=sys.stderr, flush=True)
    run = provenance(SEED, ("torch", "transformers"))
    write_results("lengths", title="Batches of varying lengths", text=TEXT, columns=COLUMNS, rows=rows, run=run)


if __name__ == "__main__":
    main()
