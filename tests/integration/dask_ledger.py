"""Blocks of bytes whose life is written down: what really lies in all workers' memories at every moment.

The clock is the machine's monotonic one, common to all processes; a copy that arrives on another worker is a block like any other.
"""

from __future__ import annotations

import time
from typing import Any

LEDGER: list[tuple[float, int]] = []


class Block:
    """`size` bytes, entered in the ledger of the process it lives in from birth to death."""

    def __init__(self, size: int, value: float) -> None:
        self.size, self.value = size, value
        self.payload = bytearray(size)
        LEDGER.append((time.monotonic(), size))

    def __del__(self) -> None:
        LEDGER.append((time.monotonic(), -self.size))

    def __sizeof__(self) -> int:
        return self.size

    def __reduce__(self) -> Any:
        return Block, (self.size, self.value)


def combine(size: int, seconds: float, *inputs: Block) -> Block:
    result = Block(size, 1 + sum(b.value for b in inputs))
    time.sleep(seconds)
    return result


def read_ledger() -> list[tuple[float, int]]:
    return list(LEDGER)


def clear_ledger() -> None:
    LEDGER.clear()


def peak_of(ledgers: list[list[tuple[float, int]]]) -> int:
    """The most bytes alive at once; at one instant deaths count first, which no clock of nanoseconds decides."""
    held = peak = 0
    for _, change in sorted(entry for ledger in ledgers for entry in ledger):
        held += change
        peak = max(peak, held)
    return peak
