"""Where the bytes of buffers come from: three memories behind one interface.

Fresh   asks NumPy for every buffer and returns it               naive, and every schedule with exact frees
Pool    keeps returned buffers and hands them out again          dynamic allocation with recycling (SOURCES A3)
Arena   one block; every buffer at its planned offset            static allocation: nothing is decided at run time (A4)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.plan import Layout
from memfit.tape.array_view import Data

EMPTY = np.empty(0, np.uint8)
"""Stands for every buffer of no bytes: NumPy would allocate one byte for each."""


def new_buffer(size_bytes: int) -> Data:
    return np.empty(size_bytes, np.uint8) if size_bytes else EMPTY


class Memory(Protocol):
    def take(self, buffer: int, size_bytes: int) -> Data: ...

    def give_back(self, buffer: int, data: Data) -> None: ...


class Fresh:
    """Every buffer is its own allocation."""

    def take(self, buffer: int, size_bytes: int) -> Data:
        return new_buffer(size_bytes)

    def give_back(self, buffer: int, data: Data) -> None:
        """The caller drops the last reference, and NumPy frees it."""


class FreeList:
    """The policy on sizes alone: best fit of at most `slack` times what is asked, else a new block.

    Shared with the prediction, which must decide as the pool does. Blocks are never split or merged: what fits badly is
    fragmentation, and shows as bytes held beyond the bytes alive. A static plan, made before anything runs, may also let
    the largest free block `grow` to what is asked.
    """

    def __init__(self, slack: float = 2.0, *, grow: bool = False) -> None:
        self.slack, self.grow = slack, grow
        self.free: list[tuple[int, int]] = []  # (size, block)
        self.sizes: list[int] = []
        self.held_bytes = 0

    def take(self, size_bytes: int) -> tuple[int, bool]:
        """The block to use, and whether it is new."""
        at = bisect_left(self.free, (size_bytes, -1))
        if at < len(self.free) and self.free[at][0] <= self.slack * size_bytes:
            return self.free.pop(at)[1], False
        if self.grow and at > 0 and self.free[at - 1][0] * self.slack >= size_bytes:
            return self._enlarge(self.free.pop(at - 1)[1], size_bytes), False
        self.sizes.append(size_bytes)
        self.held_bytes += size_bytes
        return len(self.sizes) - 1, True

    def _enlarge(self, block: int, size_bytes: int) -> int:
        self.held_bytes += size_bytes - self.sizes[block]
        self.sizes[block] = size_bytes
        return block

    def give_back(self, block: int) -> None:
        insort(self.free, (self.sizes[block], block))


class Pool:
    """Buffers recycled at run time."""

    def __init__(self, slack: float = 2.0) -> None:
        self.policy = FreeList(slack)
        self.blocks: list[Data] = []
        self.block_of: dict[int, int] = {}

    def take(self, buffer: int, size_bytes: int) -> Data:
        block, is_new = self.policy.take(size_bytes)
        if is_new:
            self.blocks.append(new_buffer(size_bytes))
        self.block_of[buffer] = block
        return self.blocks[block][:size_bytes]

    def give_back(self, buffer: int, data: Data) -> None:
        self.policy.give_back(self.block_of.pop(buffer))


class Arena:
    """One block with every buffer at its planned address."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.block = new_buffer(layout.height_bytes)

    def take(self, buffer: int, size_bytes: int) -> Data:
        start = self.layout.offsets[buffer]
        return self.block[start : start + size_bytes]

    def give_back(self, buffer: int, data: Data) -> None:
        """Addresses were decided before running: nothing to do."""


def check_fits(layout: Layout, sizes_bytes: Sequence[int]) -> None:
    if len(layout.offsets) != len(sizes_bytes):
        raise BadInput(
            f"the layout places {len(layout.offsets)} buffers, the schedule makes {len(sizes_bytes)}: it was made for another schedule."
        )
    for k, (start, size) in enumerate(zip(layout.offsets, sizes_bytes, strict=True)):
        if start < 0 or start + size > layout.height_bytes or start % 8:
            raise BadInput(
                f"buffer {k} ({size} bytes) lies at {start} in an arena of {layout.height_bytes} bytes: it must be inside, at a multiple of 8."
            )
