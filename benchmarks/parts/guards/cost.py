"""What guards cost: the check in front of every step, and capturing once, for small blocks stacked and for published models."""

from __future__ import annotations

import argparse
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.results import provenance, write_results
from benchmarks.models.torchvision_ops import declare_missing_ops
from memfit.capture.guards.fingerprint import look
from memfit.capture.guards.frame import capture_step, locals_of
from memfit.capture.inputs import Call
from memfit.runtime.closed_loop import _parts_of
from memfit.torch_private.dynamo import NotCaptured

SEED, STEP_US = 0, 10_000.0
TEXT = """Microseconds of processor time, the least of ten repeats; one thread. *check*: Dynamo's guards and what is looked at beside them, which stands in
front of every call. *before*: the walk over the modules that stood there until then. *fingerprint*: what stands there for a model that Dynamo does not
capture. *capture*: seconds to capture the step and build its guards, once per shape. *of 10 ms*: the check against a step of ten milliseconds. The
machine was shared with other work."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.act, self.drop = nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.linear(self.norm(x))))


def subjects() -> Iterator[tuple[str, nn.Module, Any, tuple[Any, ...], dict[str, Any], int]]:
    """(name, model, loss, arguments, keywords, targets among the arguments)."""
    for count in (2, 20, 100):
        x = torch.randn(4, 16)
        yield f"{count} blocks", nn.Sequential(*(Block(16) for _ in range(count))), functional.mse_loss, (x, x), {}, 1
    declare_missing_ops()
    try:
        import transformers
    except ImportError:
        return
    ids = torch.randint(0, 100, (2, 16))
    gpt = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=3, n_head=2, n_positions=32)
    yield "GPT-2 (HF)", transformers.GPT2LMHeadModel(gpt), None, (), {"input_ids": ids, "labels": ids}, 0
    llama = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2
    )
    yield "Llama (HF)", transformers.LlamaForCausalLM(llama), None, (), {"input_ids": ids, "labels": ids}, 0
    bert = transformers.BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    yield "BERT (HF)", transformers.BertForMaskedLM(bert), None, (), {"input_ids": ids, "labels": ids}, 0


def least_us(function: Callable[[], Any], number: int = 50) -> float:
    return min(timeit.repeat(function, number=number, repeat=10, timer=time.process_time)) / number * 1e6


def measure(name: str, model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_targets: int) -> dict[str, Any]:
    local = locals_of(model, loss_fn, num_targets, args, kwargs)
    call = Call.flatten(args, kwargs)
    row: dict[str, Any] = {"model": name, "modules": sum(1 for _ in model.modules())}
    began = time.process_time()
    try:
        frame = capture_step(local)
    except NotCaptured as error:
        return {**row, "check us": None, "note": str(error)[:100]}
    row["capture s"] = round(time.process_time() - began, 2)
    assert frame.serves(local)
    check = least_us(lambda: (call.shape_key(), frame.serves(local)))
    row["check us"], row["of 10 ms"] = round(check, 1), f"{check / STEP_US:.2%}"
    row["before us"] = round(least_us(lambda: _parts_of(model)), 1)
    row["fingerprint us"] = round(least_us(lambda: hash(tuple(look(model, loss_fn, call.static).found)), 3), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the rows, write no file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rows = []
    for subject in subjects():
        rows.append(measure(*subject))
        print(rows[-1], file=sys.stderr, flush=True)
    if not arguments.dry:
        columns = ["model", "modules", "check us", "of 10 ms", "before us", "fingerprint us", "capture s"]
        write_results(
            "guard_cost", title="What guards cost", text=TEXT, columns=columns, rows=rows, run=provenance(SEED, ("torch", "transformers"))
        )


if __name__ == "__main__":
    main()
