"""DistributedDataParallel around a fitted model: the same numbers as around the plain one, and its buckets are in the budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import batch, deep, same, twin
from torch import nn
from torch.nn import functional

import memfit

Wrapped = nn.parallel.DistributedDataParallel


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fit(model: nn.Module, budget: Any) -> Any:
    x, y = batch()
    return memfit.fit(model, (x,), budget=budget, loss_fn=functional.cross_entropy, example_targets=(y,), time_limit_s=3)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("views", [False, True])
def test_buckets_are_counted(views: bool) -> None:
    model = deep(dropout=0.0)
    plain, (x, y) = twin(model), batch()
    alone = fit(model, "1GiB").report().predicted_peak_bytes
    buckets = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    fitted = fit(model, alone + buckets)
    wrapped, theirs = Wrapped(fitted, gradient_as_bucket_view=views), Wrapped(plain, gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        theirs.zero_grad()
        wrapped(x, y).backward()
        functional.cross_entropy(theirs(x), y).backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert fitted.report().predicted_peak_bytes == alone + buckets


@pytest.mark.usefixtures("group")
def test_a_budget_without_room_for_buckets_is_planned_again_or_refused() -> None:
    model, (x, y) = deep(), batch()
    alone = fit(model, "1GiB").report().predicted_peak_bytes
    fitted = fit(model, alone)
    wrapped = Wrapped(fitted)
    try:
        wrapped(x, y).backward()
        assert fitted.report().predicted_peak_bytes <= alone
    except memfit.InfeasibleBudget as refusal:
        assert "outside the step" in str(refusal)  # noqa: PT017  either is right


def train_rank(rank: int, folder: str) -> None:
    """Six batches of its own, two a step, plain and fitted; fails if they differ by a bit."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = deep(dropout=0.0)
    plain = twin(model)
    (x, y), roomy = batch(), fit(twin(model), "1GiB").report().predicted_peak_bytes
    fitted = fit(model, int(1.2 * roomy))
    pair = [
        (Wrapped(fitted), lambda wrapped, x, y: wrapped(x, y)),
        (Wrapped(plain), lambda wrapped, x, y: functional.cross_entropy(wrapped(x), y)),
    ]
    optimizers = [torch.optim.SGD(wrapped.parameters(), lr=0.1) for wrapped, _ in pair]
    for step in range(6):
        x, y = batch(seed=2 * step + rank)
        for (wrapped, loss_of), optimizer in zip(pair, optimizers, strict=True):
            with nullcontext() if step % 2 else wrapped.no_sync():
                loss_of(wrapped, x, y).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_as_plain_ones(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_rank, (str(tmp_path),), nprocs=2)


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_is_refused_with_the_next_move() -> None:
    with pytest.raises(memfit.BadInput, match="fit the plain model, then wrap"):
        fit(Wrapped(deep()), "1GiB")
