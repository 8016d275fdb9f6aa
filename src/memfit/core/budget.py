"""How many bytes each memory level may hold."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import BadInput
from memfit.core.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes per level; None is no limit. `deeper_bytes` are levels past the disk, for chains that have them."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    deeper_bytes: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for level, limit in enumerate(self.limits):
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, int):
                raise BadInput(f'the budget of level {level} is {limit!r}: give whole bytes, or use Budget.parse("6GiB").')
            if limit < 0:
                raise BadInput(f"the budget of level {level} is {limit} bytes: a budget cannot be negative.")

    @property
    def limits(self) -> tuple[int | None, ...]:
        return (self.device_bytes, self.host_bytes, self.disk_bytes, *self.deeper_bytes)

    def limit(self, level: int) -> int | None:
        limits = self.limits
        return limits[level] if 0 <= level < len(limits) else None

    @staticmethod
    def parse(device: int | str, host: int | str | None = None, disk: int | str | None = None) -> Budget:
        """`Budget.parse("6GiB")`, or with limits for host and disk."""
        return Budget(
            device_bytes=parse_bytes(device, what="budget"),
            host_bytes=None if host is None else parse_bytes(host, what="host budget"),
            disk_bytes=None if disk is None else parse_bytes(disk, what="disk budget"),
        )
