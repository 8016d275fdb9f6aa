"""Counting bytes between slow and fast memory.

    slow (Q, K, V, O, in full)  ── read ──>  fast (a few blocks)  ── write ──>  slow

Attention kernels touch slow arrays only through a Traffic, so the count is of what they really did, not of a formula; the
formulas stand in `examples/attention_traffic.py` and are compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.tape.array_view import Data


@dataclass(slots=True)
class Traffic:
    """Bytes moved so far."""

    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def read(self, slow: Data, fast: Data) -> Data:
        """Copy a block in; returns the part of `fast` that holds it (the last block may be short)."""
        part = fast[tuple(slice(n) for n in slow.shape)]
        np.copyto(part, slow)
        self.read_bytes += slow.nbytes
        return part

    def write(self, fast: Data, slow: Data) -> None:
        """Copy a block out."""
        np.copyto(slow, fast)
        self.written_bytes += slow.nbytes
