"""One bit per element in place of an activation or a mask: what packs them, and gradients that read them.

Bits follow the order of memory, so strides do not matter as long as the tensor is dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit.kernels.implementation import Implementation, Work, count_bytes

aten = torch.ops.aten
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def count_packed_bytes(num_elements: int) -> int:
    return -(-num_elements // 8)


@dataclass(frozen=True, slots=True)
class PackSigns(Implementation):
    """Whether each element is above zero."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _pack(_in_memory_order(x) > 0)

    def work(self, made: torch.Tensor, x: torch.Tensor) -> Work:
        return Work.over(x, made, workspace_bytes=_unpacked_bytes(x))


@dataclass(frozen=True, slots=True)
class PackMask(Implementation):
    """A mask of booleans, which take a byte each."""

    def __call__(self, mask: torch.Tensor) -> torch.Tensor:
        return _pack(_in_memory_order(mask))

    def work(self, made: torch.Tensor, mask: torch.Tensor) -> Work:
        return Work.over(mask, made, workspace_bytes=_unpacked_bytes(mask))


@dataclass(frozen=True, slots=True)
class ReluGradientFromBits(Implementation):
    """relu's gradient from the signs of its output, which has this shape and these strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self, gradient: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return torch.where(_unpack(packed, self.shape, self.strides), gradient, 0)

    def work(self, made: torch.Tensor, gradient: torch.Tensor, packed: torch.Tensor) -> Work:
        """Bits are written and read as bytes on the way: as much traffic as with the activation."""
        return Work(moved_bytes=3 * count_bytes(gradient), workspace_bytes=_unpacked_bytes(gradient))


@dataclass(frozen=True, slots=True)
class DropoutGradientFromBits(Implementation):
    """Dropout's gradient from its packed mask, which has this shape and these strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self, gradient: torch.Tensor, packed: torch.Tensor, scale: float) -> torch.Tensor:
        result: torch.Tensor = aten.native_dropout_backward.default(gradient, _unpack(packed, self.shape, self.strides), scale)
        return result

    def work(self, made: torch.Tensor, gradient: torch.Tensor, packed: torch.Tensor, scale: float) -> Work:
        return Work(moved_bytes=2 * count_bytes(gradient) + gradient.numel(), workspace_bytes=_unpacked_bytes(gradient))


def _pack(flat: torch.Tensor) -> torch.Tensor:
    missing = -flat.numel() % 8
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=flat.device)
    return (flat.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The bits as a boolean tensor with this shape and these strides."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    flat = (packed.unsqueeze(1) & weights).view(-1)[: torch.Size(shape).numel()] != 0
    return flat.as_strided(shape, strides)


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,))


def _unpacked_bytes(x: torch.Tensor) -> int:
    """A byte for each element, before and after it is compared or weighed."""
    return 2 * x.numel()
