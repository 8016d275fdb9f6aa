"""A schedule is a list of steps that any engine can obey; only Free frees, copies copy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op in one of its forms: outputs become resident on the device."""

    op: int
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """Drop one level's copy of a storage."""

    storage: int
    level: int = 0


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy a storage from the device to a level; the device copy stays until freed."""

    storage: int
    level: int = 1


@dataclass(frozen=True, slots=True)
class Reload:
    """Copy a storage back to the device; the level's copy stays until freed."""

    storage: int
    level: int = 1


Step = Compute | Free | Offload | Reload


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: tuple[Step, ...]

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(s for s in self.steps if isinstance(s, Compute))


@dataclass(frozen=True, slots=True)
class Placement:
    """One task of a parallel schedule: where and when it starts."""

    task: int
    processor: int
    start_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSchedule:
    """For P processors: every task once. A task on several processors appears once per processor, same start."""

    placements: tuple[Placement, ...]
