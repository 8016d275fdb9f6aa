"""How often a step may be captured anew: a plan that serves one step only costs more than it saves, and what changes has a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from memfit.core.errors import Unsupported


class Turns:
    """Counts captures of one shape that no step was served by since. What changes once in a while is captured as often as it changes."""

    most: ClassVar[int] = 8
    most_by_own_writes: ClassVar[int] = 3  # a flag that forward sets once is captured twice; a counter is captured for ever

    def __init__(self) -> None:
        self._in_a_row, self._by_own_writes = 0, 0

    def served(self) -> None:
        """A step found its plan."""
        self._in_a_row = self._by_own_writes = 0

    def begin(self, changes: Sequence[str], writes: Sequence[str] = ()) -> None:
        """Another capture; refused by name where there were too many in a row. `writes`: what the step itself wrote to the last time."""
        written = [write for write in writes if any(write in change for change in changes)]
        self._by_own_writes += bool(written)
        if self._by_own_writes >= self.most_by_own_writes:
            raise Unsupported(
                f"forward changes {', '.join(map(name_of, written))} and depends on it, so that every step needs a plan of its own "
                f"({'; '.join(map(name_of, changes[:3]))} no longer holds): keep it in a buffer (a tensor), or outside of forward."
            )
        if self._in_a_row >= self.most:
            raise Unsupported(
                f"the step changed at each of {self._in_a_row} calls in a row, and each change needs a plan of its own; the last: "
                f"{'; '.join(map(name_of, changes[:4])) or 'what it computes'}. Keep what changes at every step in a tensor (a buffer, or an argument), "
                "which a plan reads, or outside of forward and loss_fn."
            )
        self._in_a_row += 1


def name_of(source: str) -> str:
    """Where Dynamo found something, as the user would say it: "L['model']._modules['fc'].p" is "model.fc.p"."""
    plain = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)
    plain = re.sub(r"\.__dict__(?=\[)|\.(_modules|_parameters|_buffers)(?=\[)|\.__dict__\['(_modules|_parameters|_buffers)'\]", "", plain)
    return re.sub(r"\['(\w+)'\]", r".\1", plain)
