"""What an optimizer holds and what its step needs for a moment, found by running it on fake tensors.

A twin of the optimizer over fake parameters is stepped twice while every allocation is counted, so any optimizer works,
with its own flags (foreach, fused, amsgrad), and nothing is computed or allocated. Which way of stepping torch takes (one
parameter after another, or all together on a GPU) is torch's own choice for the device that the step is planned for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.lower.optimizer_twin import Twins, left_as_it_is, unwrap
from memfit.capture.lower.storages import round_up
from memfit.core.errors import Unsupported
from memfit.torch_private.fake import answer_with, fake_mode, watch_ops
from memfit.torch_private.optimizers import stepping_fakes
from memfit.torch_private.random_ops import keep_random_states
from memfit.torch_private.tensors import storage_key
from memfit.torch_private.trees import leaves_of

SCALARS_BYTES = 16
"""Python numbers in an op (`/ 0.04`, `+ eps`) become tensors of a few bytes, which tracing does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """`state_bytes` stay between steps; `temporary_bytes` is the most a step holds besides."""

    state_bytes: int
    temporary_bytes: int


def optimizer_bytes(optimizer: torch.optim.Optimizer, *, granularity: int = 1, device: str | None = None) -> OptimizerBytes:
    """State and temporaries of `optimizer`, for gradients on every parameter that requires one.

    `device` is the kind of device the step will run on, where that is not the parameters' own. The optimizer is not touched.
    """
    real = unwrap(optimizer)
    try:
        with keep_random_states(), left_as_it_is(real), fake_mode(allow_non_fake_inputs=True), stepping_fakes():
            return _count(real, _Counter(granularity), device)
    except Exception as error:
        raise Unsupported(
            f"the memory of {type(optimizer).__name__} could not be found out ({type(error).__name__}: {str(error)[:120]}): "
            "leave out optimizer= and pass its bytes as reserve=."
        ) from error


def _count(real: Any, counter: _Counter, device: str | None) -> OptimizerBytes:
    twins = Twins(real, device)
    twin = twins.optimizer()
    with watch_ops(counter.run):
        twins.carry_state()
        twin.step()
        state = counter.held
        counter.peak = counter.held
        twin.step()
    temporary = counter.peak - state
    return OptimizerBytes(state_bytes=state, temporary_bytes=temporary + SCALARS_BYTES if temporary else 0)


class _Counter:
    """Counts live bytes of the storages that ops make."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.held = self.peak = 0
        self.live: set[int] = set()

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        known = {storage_key(t) for t in leaves_of((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = answer_with(1, op, args, kwargs)
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
