"""The torch half of `memfit demo`: a small GPT and a small ResNet trained inside half of the memory they would take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memfit
from memfit.pipeline.study import find_smallest_budget
from memfit.report.timeline import Curve, Panel
from memfit.runtime.autograd_step import source_bytes
from memfit.torch_private.allocations import peaks_of

_SHARE = 0.5  # of the activation memory that the plain step takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: measured with plain PyTorch and fitted."""

    name: str
    plain_peak_bytes: int
    budget_bytes: int
    fitted_peak_bytes: int
    predicted_peak_bytes: int
    plain_ms: float
    fitted_ms: float
    check: str
    identical: bool

    @property
    def inside(self) -> bool:
        return self.fitted_peak_bytes <= self.budget_bytes


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        hidden: torch.Tensor = self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))
        return x + hidden


class SmallGPT(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.body(x))


class SmallResNet(nn.Sequential):
    def __init__(self, width: int = 24, depth: int = 8) -> None:
        stem = nn.Conv2d(3, width, 3, padding=1)
        super().__init__(stem, *(Residual(width) for _ in range(depth)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def examples(device: str) -> dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    """Model, inputs and targets, on this device."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (8, 128), device=device)
    images = torch.randn(16, 3, 32, 32, device=device)
    return {
        "small GPT": (SmallGPT().to(device), tokens, tokens.roll(-1, 1).flatten()),
        "small ResNet": (SmallResNet().to(device), images, torch.randint(0, 10, (16,), device=device)),
    }


def run_demo(say: Callable[[str], None]) -> tuple[list[Row], list[Panel]]:
    """Measure every example plain and fitted; returns the table and what to draw."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, panels = [], []
    for name, (model, inputs, targets) in examples(device).items():
        say(f"{name}: plain PyTorch")
        row, panel = _compare(name, model, inputs, targets, say)
        rows.append(row)
        panels.append(panel)
    return rows, panels


def _compare(name: str, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, say: Callable[[str], None]) -> tuple[Row, Panel]:
    loss_fn, device = nn.functional.cross_entropy, inputs.device
    optimizer = torch.optim.AdamW(model.parameters())
    whole = memfit.fit(model, (inputs,), budget=2**60, optimizer=optimizer, loss_fn=loss_fn, example_targets=(targets,), check=False)
    held = source_bytes(whole._memfit._current().ready.captured)
    plain = _step(lambda: loss_fn(model(inputs), targets), optimizer)
    plain_peak, plain_ms = _measure(plain, device, held)
    floor = find_smallest_budget(whole._memfit._current().ready.captured.graph, whole._memfit._current().ready.costs, time_limit_s=3)
    budget = max(held + int((plain_peak - held) * _SHARE), floor.require_plan().timeline.peak_bytes)
    say(f"{name}: fitting into {memfit.core.format_bytes(budget)}")
    fitted = memfit.fit(
        model, (inputs,), budget=budget, optimizer=optimizer, loss_fn=loss_fn, example_targets=(targets,), check=False, time_limit_s=10
    )
    verdict = _check(fitted, inputs, targets)
    fitted_peak, fitted_ms = _measure(_step(lambda: fitted(inputs, targets), optimizer), device, held)
    row = Row(
        name=name,
        plain_peak_bytes=plain_peak,
        budget_bytes=budget,
        fitted_peak_bytes=fitted_peak,
        predicted_peak_bytes=fitted.plan.timeline.peak_bytes,
        plain_ms=plain_ms,
        fitted_ms=fitted_ms,
        check=verdict.sentence(),
        identical=verdict.identical,
    )
    curves = [_curve("plain order", whole), _curve("planned", fitted)]
    return row, Panel(title=name, curves=curves, budget_bytes=budget)


def _step(forward: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _measure(step: Callable[[], None], device: torch.device, held_bytes: int) -> tuple[int, float]:
    """(peak bytes of a whole step, optimizer included; milliseconds, median of five), after two to warm up."""
    for _ in range(2):
        step()
    _, peak = peaks_of(step, device)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return held_bytes + peak, statistics.median(times)


def _check(fitted: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """The first step against the plain model, whatever the budget: it is a demonstration."""
    stepper = fitted._memfit
    stepper.check = "always"
    fitted(inputs, targets).backward()
    stepper.check = False
    fitted.zero_grad(set_to_none=True)
    return stepper._current().verdict


def _curve(label: str, fitted: Any) -> Curve:
    """Bytes against op time, for the picture."""
    from memfit.core.schedule import Compute

    plan, costs = fitted.plan, fitted._memfit._current().ready.costs
    clock, times = 0.0, []
    for step in plan.schedule.steps:
        times.append(clock)
        if isinstance(step, Compute):
            clock += costs.time_ns(step.op, step.variant) / 1e6
    return Curve(label=label, times=times, bytes_held=plan.timeline.bytes_at_step)
