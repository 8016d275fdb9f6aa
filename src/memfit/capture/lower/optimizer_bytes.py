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

from memfit.capture.lower.storages import round_up
from memfit.core.errors import Unsupported
from memfit.torch_private.fake import fake_mode, is_fake, watch_ops
from memfit.torch_private.tensors import storage_key
from memfit.torch_private.trees import leaves_of

SCALARS_BYTES = 16
"""Python numbers in an op (`/ 0.04`, `+ eps`) become tensors of a few bytes, which tracing does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """`state_bytes` stay between steps; `temporary_bytes` is the most a step holds besides."""

    state_bytes: int
    temporary_bytes: int


def optimizer_bytes(optimizer: torch.optim.Optimizer, *, granularity: int = 1) -> OptimizerBytes:
    """State and temporaries of `optimizer`, for gradients on every parameter that requires one."""
    counters = {id(t): t.item() for t in leaves_of(dict(optimizer.state)) if _is_counter(t)}
    with fake_mode(allow_non_fake_inputs=True):
        twin = _fake_twin(optimizer)
        counter = _Counter(granularity)
        try:
            with watch_ops(counter.run):
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


def _fake_twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    twin = copy.copy(optimizer)
    twin.__dict__ = dict(optimizer.__dict__)
    groups = []
    for group in optimizer.param_groups:
        fakes = []
        for parameter in group["params"]:
            fake = parameter if is_fake(parameter) else torch.empty_like(parameter, device=_device(parameter))
            fake = torch.nn.Parameter(fake.detach(), requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                fake.grad = torch.empty_like(fake)
            fakes.append(fake)
        groups.append({**group, "params": fakes})
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "meta" and not is_fake(value)


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


class _Counter:
    """Counts live bytes of the storages that ops make."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.held = self.peak = 0
        self.live: set[int] = set()

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        known = {storage_key(t) for t in leaves_of((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = op(*args, **kwargs)
        for tensor in leaves_of(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage_key(storage) not in known | self.live:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), round_up(storage.nbytes(), self.granularity)
        self.live.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        if key in self.live:
            self.live.discard(key)
            self.held -= size
