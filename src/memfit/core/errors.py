"""Every error memfit raises on purpose.

A message says *what* went wrong, *the numbers*, *the cause* and *the next move*, in that order and in one line: it is
what a user sees at the end of a terminal, and what `--json` prints.
"""

from __future__ import annotations


class MemfitError(Exception):
    """The one base class: `except memfit.MemfitError` catches all of ours and nothing else.

    Names in a message may come from a stranger's file: what a terminal would not print as itself is escaped, so that a
    message is always one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """The text with control characters, newlines and lone surrogates written as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class BadInput(MemfitError, ValueError):
    """A value, file or argument that cannot be what was meant."""


class IllegalSchedule(MemfitError, ValueError):
    """The judge refused a schedule. `step` is the position of the offending step, or -1 for the end of the schedule."""

    def __init__(self, step: int, cause: str) -> None:
        self.step = step
        self.cause = cause
        where = f"step {step}" if step >= 0 else "the end of the schedule"
        super().__init__(f"illegal schedule at {where}: {cause}")

    def __reduce__(self) -> tuple[type[IllegalSchedule], tuple[int, str]]:
        return type(self), (self.step, self.cause)  # so that it survives the way back from a worker process


class InfeasibleBudget(MemfitError, ValueError):
    """No plan can fit, and the message carries the number that proves it."""

    def __init__(self, message: str, *, minimum_bytes: int | None = None) -> None:
        self.minimum_bytes = minimum_bytes
        super().__init__(message)


class NoPlanFound(MemfitError, RuntimeError):
    """The planner gave up without a proof: more time or another planner may still succeed."""


class Unsupported(MemfitError, RuntimeError):
    """Something memfit knows it cannot do exactly, refused by name with the way round."""


class StorageFailed(MemfitError, RuntimeError):
    """A checkpoint could not be written or read (a full disk, a damaged file); what was complete before is untouched."""
