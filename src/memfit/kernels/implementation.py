"""What a call of a step runs, and what that takes of any device.

    target(*args) ──> made                     an engine runs it
    target.work(samples of made, *samples) ──> Work          a roofline prices it

A target is one of PyTorch's ops, whose arithmetic PyTorch's own table counts, or an `Implementation` of memfit's, which counts its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.flop_counter import flop_registry

from memfit.torch_private.trees import leaves_of

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
_COUNTED_AS = {  # not in PyTorch's table, with the arguments of one that is
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Arithmetic and memory traffic go on at the same time, so the longer of the two counts; what is in `then` runs afterwards.

    `workspace_bytes` are allocated beside inputs and outputs. `half`: the products are of 16-bit numbers.
    """

    flops: float = 0.0
    moved_bytes: int = 0
    workspace_bytes: int = 0
    launches: int = 1
    half: bool = False
    then: tuple[Work, ...] = ()

    @classmethod
    def over(cls, given: Any, made: Any, *, flops: float = 0.0, launches: int = 1, workspace_bytes: int = 0) -> Work:
        """Of kernels that read each given tensor once and write each tensor they make once."""
        return cls(
            flops=flops,
            moved_bytes=count_bytes(given) + count_bytes(made),
            workspace_bytes=workspace_bytes,
            launches=launches,
            half=any(t.dtype in HALF for t in _find_tensors(given)),
        )


@runtime_checkable
class Implementation(Protocol):
    """A target of memfit's own. The name tells it from others, and is the same in every process."""

    @property
    def name(self) -> str:
        return repr(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def work(self, made: Any, *args: Any, **kwargs: Any) -> Work:
        """What `__call__` takes with tensors like these arguments, when it returns tensors like `made`."""
        ...


class TorchOp(Protocol):
    """One of PyTorch's own ops."""

    @property
    def overloadpacket(self) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Target = Implementation | TorchOp


def work_of(target: Any, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
    """What a call of any target takes; PyTorch's own ops are counted without workspace."""
    if isinstance(target, Implementation):
        return target.work(made, *args, **kwargs)
    return Work.over((args, dict(kwargs)), made, flops=count_flops(target, made, *args, **kwargs))


def count_flops(op: Any, made: Any, *args: Any, **kwargs: Any) -> float:
    """Of one of PyTorch's ops, by PyTorch's own table. Shapes will do in place of samples."""
    packet: Any = getattr(op, "overloadpacket", None)
    formula = flop_registry.get(_COUNTED_AS.get(packet, packet))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=made))


def count_bytes(values: Any) -> int:
    """Of the distinct tensors among nested values."""
    return sum(t.numel() * t.element_size() for t in _find_tensors(values))


def _find_tensors(values: Any) -> list[torch.Tensor]:
    return list({id(v): v for v in leaves_of(values) if isinstance(v, torch.Tensor)}.values())
