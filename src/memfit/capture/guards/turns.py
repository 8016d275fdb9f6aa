"""How often a step may be captured anew: a plan that serves one step only costs more than it saves, and what changes has a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from memfit.core.errors import Unsupported


class Turns:
    """Counts captures of one shape that no step was served by since. What changes once in a while is captured as often as it changes."""

    most: ClassVar[int] = 8

    def __init__(self) -> None:
        self._in_a_row = 0

    def served(self) -> None:
        """A step found its plan."""
        self._in_a_row = 0

    def begin(self, changes: Sequence[str], writes: Sequence[str] = ()) -> None:
        """Another capture; refused by name where there were too many in a row. `writes`: what the step itself wrote to the last time."""
        if self._in_a_row < self.most:
            self._in_a_row += 1
            return
        last = "; ".join(map(name_of, changes[:4])) or "what it computes"
        written = [name_of(write) for write in writes if any(write in change for change in changes)]
        if written:
            raise Unsupported(
                f"forward changes {', '.join(written)} and depends on it, so that each of {self._in_a_row} steps in a row needed a plan of its own "
                f"(the last time this changed: {last}): keep it in a buffer (a tensor), or outside of forward."
            )
        raise Unsupported(
            f"the step changed at each of {self._in_a_row} calls in a row, and each change needs a plan of its own; the last: {last}. Keep what changes at "
            "every step in a tensor (a buffer, or an argument), which a plan reads, or outside of forward and loss_fn."
        )


def name_of(source: str) -> str:
    """Where Dynamo found something, as the user would say it: "L['model']._modules['fc'].p" is "model.fc.p"."""
    plain = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source).replace(".__dict__", "")
    plain = re.sub(r"(\.|\[')(_modules|_parameters|_buffers)('\])?(?=\[|\.|$)", "", plain)
    return re.sub(r"\['(\w+)'\]", r".\1", plain)
