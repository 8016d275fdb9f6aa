"""What an optimizer holds and what its step needs for a moment, found by running it on fake tensors.

The optimizer is copied with fake parameters and stepped twice while every allocation is counted, so any optimizer works,
with its own flags (foreach, fused, amsgrad), and nothing is computed or allocated.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.capture.lower.storages import round_up
from memfit.core.errors import Unsupported

SCALARS_BYTES = 16
"""Python numbers in an op (`/ 0.04`, `+ eps`) become tensors of a few bytes, which tracing does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """`state_bytes` stay between steps; `temporary_bytes` is the most a step holds besides."""

    state_bytes: int
    temporary_bytes: int


def optimizer_bytes(optimizer: torch.optim.Optimizer, *, granularity: int = 1) -> OptimizerBytes:
    """State and temporaries of `optimizer`, for gradients on every parameter that requires one."""
    counters = {id(t): t.item() for t in tree_leaves(dict(optimizer.state)) if _is_counter(t)}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        twin = _fake_twin(optimizer, mode)
        counter = _Counter(granularity)
        try:
            with counter:
                _carry_state(optimizer, twin, counters)
                twin.step()
                state = counter.held
                counter.peak = counter.held
                twin.step()
        except Exception as error:
            raise Unsupported(
                f"the memory of {type(optimizer).__name__} could not be found out ({type(error).__name__}: {str(error)[:120]}): "
                "leave out optimizer= and pass its bytes as reserve=."
            ) from error
    temporary = counter.peak - state
    return OptimizerBytes(state_bytes=state, temporary_bytes=temporary + SCALARS_BYTES if temporary else 0)


def _fake_twin(optimizer: torch.optim.Optimizer, mode: FakeTensorMode) -> torch.optim.Optimizer:
    twin = copy.copy(optimizer)
    twin.__dict__ = dict(optimizer.__dict__)
    groups = []
    for group in optimizer.param_groups:
        fakes = []
        for parameter in group["params"]:
            fake = parameter if isinstance(parameter, FakeTensor) else torch.empty_like(parameter, device=_device(parameter))
            fake = torch.nn.Parameter(fake.detach(), requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                fake.grad = torch.empty_like(fake)
            fakes.append(fake)
        groups.append({**group, "params": fakes})
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "meta" and not isinstance(value, FakeTensor)


def _carry_state(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, counters: dict[int, float]) -> None:
    """What the optimizer has already: some make it in their constructor (Adagrad before torch 2.13) and look for it in a step.
    Counters keep their values, which steps ask for."""

    def fake(value: Any) -> Any:
        if id(value) in counters:
            return torch.tensor(counters[id(value)], dtype=value.dtype)
        return torch.empty_like(value, device=_device(value)) if isinstance(value, torch.Tensor) else value

    for group, fakes in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for parameter, stand_in in zip(group["params"], fakes["params"], strict=True):
            if known := optimizer.state.get(parameter):
                twin.state[stand_in] = {key: fake(value) for key, value in known.items()}


def _device(tensor: torch.Tensor) -> str | torch.device:
    return "cpu" if tensor.device.type == "meta" else tensor.device


class _Counter(TorchDispatchMode):
    """Counts live bytes of the storages that ops make."""

    def __init__(self, granularity: int) -> None:
        super().__init__()
        self.granularity = granularity
        self.held = self.peak = 0
        self.live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self.live:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, round_up(storage.nbytes(), self.granularity)
        self.live.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        if key in self.live:
            self.live.discard(key)
            self.held -= size
