"""The bytes of every optimizer of torch are counted right, behind whatever the training loop put around it, and nothing is touched."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.snapshots import snapshot
from tests.storage_meter import StorageMeter
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memfit
from memfit.capture.lower.optimizer_bytes import SCALARS_BYTES, optimizer_bytes

OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
REFUSED = {torch.optim.LBFGS, torch.optim.SparseAdam}  # one asks for a closure, the other for sparse gradients
COUNTED = [kind for kind in OPTIMIZERS if kind not in REFUSED]
SCHEDULER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 2]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10, "cycle_momentum": False},
    "SequentialLR": {"milestones": [1]},
}
SCHEDULERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim.lr_scheduler, inspect.isclass)
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
    and kind is not torch.optim.lr_scheduler.LRScheduler
    and not kind.__name__.startswith("_")
]


def schedule(kind: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of this kind around the optimizer."""
    if kind.__name__ in ("SequentialLR", "ChainedScheduler"):
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return kind(optimizer, parts, [1]) if kind.__name__ == "SequentialLR" else kind(parts)
    return kind(optimizer, **SCHEDULER_ARGUMENTS.get(kind.__name__, {}))


def model_of(*, gradients: bool = False, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Weights only, and matrices only: Muon takes nothing else."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    x = torch.randn(4, 6)
    if gradients:
        model(x).square().mean().backward()
    return model, x


# -- what stands around an optimizer in training loops -----------------------------------------------------------------


class Averaging(torch.optim.Optimizer):
    """A wrapper as Lookahead is one: groups and state are the inner optimizer's, with slow weights beside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, inner.state
        self.calls = 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", torch.clone(parameter).detach())
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)


def _accelerated(optimizer: torch.optim.Optimizer) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(optimizer)


def _half_accelerated(optimizer: torch.optim.Optimizer) -> Any:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))  # it makes its scale at the first call
    return AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)


def _as_apex(optimizer: torch.optim.Optimizer) -> Any:
    """`step` put on the instance, bound to it, with a stash beside: as apex.amp does."""
    plain = optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    optimizer._amp_stash = {"owner": optimizer, "fp32_grads": []}  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def _with_hooks(optimizer: torch.optim.Optimizer) -> Any:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.calls = calls  # type: ignore[attr-defined]
    return optimizer


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda optimizer: optimizer,
    "accelerate": _accelerated,
    "accelerate with a scaler": _half_accelerated,
    "apex": _as_apex,
    "averaging": Averaging,
    "hooks": _with_hooks,
}
SITUATIONS = [
    *((optimizer, SCHEDULERS[i % len(SCHEDULERS)], wrapper) for i, optimizer in enumerate(OPTIMIZERS) for wrapper in WRAPPERS),
    *((torch.optim.AdamW, scheduler, "bare") for scheduler in SCHEDULERS),
]
NAMES = [f"{o.__name__}-{s.__name__}-{w}" for o, s, w in SITUATIONS]


@contextmanager
def _counting_global_hooks() -> Iterator[list[int]]:
    calls: list[int] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


@pytest.mark.parametrize(("kind", "scheduler", "wrapper"), SITUATIONS, ids=NAMES)
def test_fit_leaves_the_training_loop_as_it_was(kind: Any, scheduler: Any, wrapper: str) -> None:
    """In the middle of training: one step done, gradients of the next micro-step there."""
    model, x = model_of(gradients=True)
    optimizer = kind(model.parameters(), lr=0.01)
    if kind not in REFUSED:
        optimizer.step()
    schedule_ = schedule(scheduler, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    wrapped = WRAPPERS[wrapper](optimizer)
    with _counting_global_hooks() as calls:
        before = snapshot(model, optimizer, wrapped, schedule_, scaler, x)
        with nullcontext() if kind in COUNTED else pytest.raises(memfit.Unsupported, match="reserve"):
            memfit.fit(model, (x,), budget="1GiB", planner="keep_all", optimizer=wrapped)
        assert snapshot(model, optimizer, wrapped, schedule_, scaler, x) == before
        assert not calls


def _real_bytes(step: Callable[[], Any]) -> tuple[int, int]:
    with StorageMeter() as meter:
        step()
        state = meter.held
        meter.peak = meter.held
        step()
    return state, meter.peak - state


@pytest.mark.parametrize("wrapper", ["bare", "accelerate", "averaging", "hooks"])
@pytest.mark.parametrize("kind", COUNTED, ids=lambda k: k.__name__)
def test_counted_bytes_are_those_really_taken(kind: Any, wrapper: str) -> None:
    model, _ = model_of(gradients=True)
    optimizer = kind(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = WRAPPERS[wrapper](optimizer)
    found = optimizer_bytes(wrapped)
    early = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor))
    state, temporary = _real_bytes(wrapped.step)
    assert found.state_bytes == state + early
    assert 0 <= found.temporary_bytes - temporary <= SCALARS_BYTES
    assert optimizer_bytes(wrapped) == found  # the same once the state is there


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_wrapped_optimizer_still_trains_after_fit(wrapper: str) -> None:
    """Losses of a loop with a scheduler and accumulation are those without memfit."""

    def losses(fit: bool) -> list[float]:
        model, x = model_of(gradients=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        wrapped = WRAPPERS[wrapper](optimizer)
        run: Any = memfit.fit(model, (x,), budget="1GiB", planner="keep_all", optimizer=wrapped) if fit else model
        seen = []
        for step in range(6):
            loss = run(x).square().mean()
            loss.backward()
            seen.append(loss.item())
            if step % 2:
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
        return seen

    plain = losses(False)
    assert losses(True) == plain
    assert plain[0] != plain[-1]


def test_a_gpu_steps_all_parameters_together() -> None:
    """What a CPU's loop holds for a moment is one parameter's; a GPU's default holds all of them, fused ones none."""
    sizes = (1000,) * 20

    def temporary(device: str | None, **flags: Any) -> int:
        return optimizer_bytes(torch.optim.AdamW([nn.Parameter(torch.zeros(n)) for n in sizes], **flags), device=device).temporary_bytes

    whole = 4 * sum(sizes)
    assert 4 * max(sizes) <= temporary(None) < whole / 4
    assert temporary(None) == temporary("cuda", foreach=False)
    assert temporary("cuda") == temporary("cuda", foreach=True) == temporary(None, foreach=True)
    assert temporary("cuda") >= whole
    assert temporary("cuda", fused=True) <= 64


def test_an_estimate_for_a_gpu_counts_its_own_way_of_stepping() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(1, 64)

    def peak(device: str, **flags: Any) -> int:
        return memfit.estimate(
            model, (x,), optimizer=torch.optim.AdamW(model.parameters(), **flags), device=device, time_limit_s=1
        ).peak_bytes

    parameters = sum(p.nbytes for p in model.parameters())
    assert peak("h200") == peak("h200", foreach=True)
    assert peak("h200") - peak("h200", foreach=False) > 0.5 * parameters
    assert peak("h200") - peak("h200", fused=True) > 0.9 * parameters
    assert peak("cpu") < peak("h200")


def test_an_optimizer_that_draws_numbers_leaves_the_streams_alone() -> None:
    import random

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.last = random.random()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.add_(torch.randn_like(parameter.grad))
            return super().step()

    model, x = model_of(gradients=True)
    optimizer = Noisy(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    assert memfit.fit(model, (x,), budget="1GiB", planner="keep_all", optimizer=optimizer).plan.timeline.peak_bytes
    assert snapshot(model, optimizer) == before


def test_an_optimizer_that_cannot_be_stepped_is_refused_and_left_alone() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["half"] = torch.zeros(3)
            self.param_groups[0]["lr"] = 7.0
            raise ValueError("no")

    model, x = model_of(gradients=True)
    optimizer = Broken(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    with pytest.raises(memfit.Unsupported, match=r"Broken.*reserve"):
        memfit.fit(model, (x,), budget="1GiB", planner="keep_all", optimizer=optimizer)
    assert snapshot(model, optimizer) == before
