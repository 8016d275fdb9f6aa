"""Small models, how they are fitted in tests, and the plain training they are held against. Imports torch."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.capture.inputs import Inputs
from memfit.core.graph import Kind
from memfit.torch_private.allocations import peaks_of

torch.set_num_threads(1)  # more threads wait for each other on a busy machine
CPU = torch.device("cpu")
NO_LIMIT = 2**50
needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor on the CPU needs a C++ compiler"
)


def deep(width: int = 16, depth: int = 4, dropout: float = 0.2, classes: int = 5) -> nn.Module:
    """Linear, BatchNorm, GELU, Dropout, several times."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, classes))


class Tied(nn.Module):
    """Embedding and head share a weight; dropout, LayerNorm and attention between."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.body = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def batch(rows: int = 32, width: int = 16, classes: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randint(0, classes, (rows,), generator=generator)


def fixed_bytes(fitted: Any) -> int:
    """Parameters, buffers, inputs, optimizer state and one set of gradients."""
    graph = fitted._memfit.latest.ready.captured.graph
    lasting = {graph.storage_of(t) for t in graph.sources} | {s.id for s in graph.storages if s.kind is Kind.GRADIENT}
    return sum(graph.storages[s].size_bytes for s in lasting)


def fit_tight(model: nn.Module, inputs: Any, *, fraction: float = 0.6, planner: Any = "greedy", **options: Any) -> Any:
    """Fitted with `fraction` of what a step holds above the fixed bytes when everything is kept."""
    free: Any = memfit.fit(model, inputs, budget=NO_LIMIT, planner="keep_all", **options)
    fixed, peak = fixed_bytes(free), free.plan.timeline.peak_bytes
    fitted: Any = memfit.fit(model, inputs, budget=fixed + int(fraction * (peak - fixed)), planner=planner, **options)
    return fitted


def recomputes(fitted: Any) -> bool:
    """Whether the plan runs some op twice."""
    ops = [step.op for step in fitted.plan.schedule.steps if hasattr(step, "op")]
    return len(ops) > len(set(ops))


def train(
    model: Any,
    batches: Sequence[tuple[Any, ...]],
    *,
    loss_fn: Callable[..., Any] | None = functional.cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 7,
    set_to_none: bool = True,
) -> dict[str, Any]:
    """Train and tell everything that could differ: losses, gradients of every step, weights, buffers, the random stream."""
    torch.manual_seed(seed)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for inputs, *targets in batches:
        given = Inputs.of(inputs)
        loss = model(*given.args, **given.kwargs) if loss_fn is None else loss_fn(model(*given.args, **given.kwargs), *targets)
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "state": state, "random": torch.get_rng_state()}


def same(a: Any, b: Any) -> bool:
    """Bitwise, through nested containers."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and (torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, *inputs: torch.Tensor) -> int:
    """What exists between steps, each storage once."""
    state = [v for s in optimizer.state.values() for v in s.values()] if optimizer else []
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *inputs, *state]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}.values())


def peak_bytes(function: Callable[[], Any], held: int) -> int:
    """The most bytes held while `function` runs, with `held` bytes before it."""
    return held + peaks_of(function, CPU)[1]


def assert_trains_inside(fitted: Any, plain: nn.Module, batch: tuple[torch.Tensor, ...], budget: int, *, replay: bool) -> None:
    """Some steps of the same batch, enough to be replayed: the measured peak inside the budget and as predicted, the plain model's gradients in
    the parameters' layouts."""
    for _ in range(7):
        fitted.zero_grad(set_to_none=True)
        fitted(*batch).backward()
    report = fitted.report()
    assert report.measured_peak_bytes <= budget
    if not replay:
        assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.01 * budget
    for ours, reference in zip(fitted.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert reference.grad is not None
        assert ours.grad.stride() == ours.stride()
        assert (ours.grad - reference.grad).abs().max() <= 1e-9 * reference.grad.abs().max()


def same_steps(
    plain: nn.Module, fitted: Any, step: Callable[[], torch.Tensor], fitted_step: Callable[[], torch.Tensor], num_steps: int = 2
) -> None:
    """Some steps of both from the same random numbers: loss and gradients to the last bit, None where the plain model has None."""
    for seed in range(num_steps):
        losses = []
        for model, run in ((plain, step), (fitted, fitted_step)):
            model.zero_grad()
            torch.manual_seed(seed)
            losses.append(run())
            losses[-1].backward()
        assert torch.equal(losses[0], losses[1])
        for (name, p), q in zip(plain.named_parameters(), fitted.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
