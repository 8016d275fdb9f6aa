"""Planned arenas on a CUDA device: reserved bytes are the arena's and the pool's, numbers do not change, out of memory is survived.

An allocator is chosen once per process, so each test runs a script of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[2]

COMMON = """
import json, sys
sys.path.insert(0, {source!r})
import torch, memfit
from torch import nn
from memfit.cli.torch_demo import SmallGPT, SmallResNet
allocator = memfit.use_planned_arena() if {arena} else None
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.deterministic = True

def example(name):
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(0, 1000, (64, 128), device="cuda")
        return SmallGPT(width=256).cuda(), tokens, tokens.roll(-1, 1).flatten()
    return SmallResNet(width=64).cuda(), torch.randn(128, 3, 64, 64, device="cuda"), torch.randint(0, 10, (128,), device="cuda")

def fit(model, x, y, optimizer=None, fraction=0.6):
    whole = memfit.estimate(model, (x,), loss_fn=nn.functional.cross_entropy, example_targets=(y,), optimizer=optimizer).peak_bytes
    return memfit.fit(model, (x,), budget=int(fraction * whole), optimizer=optimizer, loss_fn=nn.functional.cross_entropy,
                      example_targets=(y,), check=False, allow=("recompute",), time_limit_s=3)
"""

TRAIN = """
model, x, y = example({name!r})
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
fitted = fit(model, x, y, optimizer)
losses, reserved = [], []
for step in range({steps}):
    torch.cuda.reset_peak_memory_stats()
    loss = fitted(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    losses.append(loss.item())
    reserved.append(torch.cuda.max_memory_reserved())
result = {{"losses": losses, "reserved": reserved, "allocated": torch.cuda.max_memory_allocated(), "arena": fitted.report().arena_bytes,
          "budget": fitted.report().budget_bytes, "notes": fitted.report().notes}}
if allocator is not None:
    verdict = fitted._memfit._current().ready.arena.last
    result["verdict"] = [verdict.made, verdict.skipped, verdict.strays, verdict.collisions, verdict.lingering]
    result["stats"] = allocator.stats().arena_bytes
print(json.dumps(result))
"""

SHORT = """
model, x, y = example("resnet")
fitted = memfit.fit(model, (x,), budget=2**40, loss_fn=nn.functional.cross_entropy, example_targets=(y,), check=False)
peak = fitted.plan.timeline.peak_bytes
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 0.85 * peak) / total)
fitted(x, y).backward()
finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
try:
    torch.empty(total, dtype=torch.uint8, device="cuda")
    refused = False
except torch.OutOfMemoryError:
    refused = True
print(json.dumps({"finite": finite, "notes": fitted.report().notes, "refused": refused}))
"""

ACCUMULATE = """
model, x, y = example("gpt")
twin = SmallGPT(width=256).cuda()
twin.load_state_dict(model.state_dict())
for m in (model, twin):
    m.eval()  # no dropout: the same numbers whatever was drawn
fitted = fit(model, x, y, fraction=0.7)
for _ in range(3):
    model.zero_grad(set_to_none=True)
    for _ in range(3):
        fitted(x, y).backward()
for _ in range(3):
    nn.functional.cross_entropy(twin(x), y).backward()
largest = max(p.grad.abs().max() for p in twin.parameters())  # the last norm's bias has nothing but rounding: targets are the tokens, rolled
worst = max(((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-3 * largest)).item()
            for a, b in zip(model.parameters(), twin.parameters()))
print(json.dumps({"worst": worst, "in_arena": allocator.stats().num_in_arena}))
"""


def run(script: str, *, arena: bool, **values: Any) -> dict[str, Any]:
    text = COMMON.format(source=str(ROOT / "src"), arena=arena) + (script.format(**values) if values else script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_reserved_is_the_arena_and_the_losses_are_the_same(name: str) -> None:
    planned, plain = (run(TRAIN, arena=arena, name=name, steps=12) for arena in (True, False))
    print(name, {k: v for k, v in planned.items() if k != "losses"}, "without an arena:", plain["reserved"])
    assert planned["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert planned["verdict"][1:] == [0, 0, 0, 0], planned
    assert planned["arena"] is not None
    assert planned["stats"] - planned["arena"] < 2 * 2**20
    assert planned["reserved"][-1] <= planned["allocated"] + 128 * 2**20  # a pool takes chunks of 32 MiB
    assert planned["reserved"][-1] <= planned["budget"]
    assert planned["reserved"][-1] <= plain["reserved"][-1]


def test_out_of_memory_is_torchs_own_error() -> None:
    result = run(SHORT, arena=True)
    assert result["finite"]
    assert result["refused"]
    assert any("out of memory" in note for note in result["notes"])


def test_gradients_accumulate_in_the_arena() -> None:
    result = run(ACCUMULATE, arena=True)
    assert result["worst"] < 1e-3
    assert result["in_arena"] > 0


def test_too_late_is_refused_with_the_next_move() -> None:
    text = "import torch, memfit\ntorch.zeros(1).cuda()\nmemfit.use_planned_arena()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{text}"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "right after the imports" in done.stderr
