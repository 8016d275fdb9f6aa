"""Buffers to be placed in one or several arenas, a packing of them, and the judge that says whether it is one.

    address │ ┌───── a ─────┐
            │ │      ┌──────┴──┐      alive together: a and b must not share addresses,
            │ └──────┤    b    │      unless they were declared to share (an in-place pair):
            └────────┴─────────┴──>   then they begin at the same address

The judge knows no packer; every packing is judged before it is returned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memfit.core.errors import BadInput
from memfit.core.outcome import Answer
from memfit.core.units import format_bytes

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """`size` bytes from time `start` until before `stop`, at a multiple of `alignment`, in arena number `arena`.

    `offset` prescribes the address; `None` leaves it to the packer.
    """

    id: str
    start: int
    stop: int
    size: int
    alignment: int = 1
    offset: int | None = None
    arena: int = 0

    @property
    def is_empty(self) -> bool:
        """No bytes or no lifetime: it collides with nothing."""
        return self.size == 0 or self.stop == self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Answer):
    """Where every buffer lies (`offsets[k]` for the k-th buffer) and what is known about doing better.

    Heights and bounds are those of the highest arena; `arena_heights` has all. With a capacity, FEASIBLE and OPTIMAL packings
    are inside it; an INFEASIBLE or UNKNOWN one is the lowest packing found, and higher than the capacity.
    """

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    arena_heights: Mapping[int, int]
    capacity: int | None = None
    method: str = ""
    nodes: int = 0

    @property
    def offset_of(self) -> dict[str, int]:
        """Offset by buffer id."""
        return {b.id: o for b, o in zip(self.buffers, self.offsets, strict=True)}

    @property
    def gap_fraction(self) -> float:
        """How far the height may be above the best possible one."""
        return (self.height - self.lower_bound) / self.lower_bound if self.lower_bound else 0.0


def check_packing(
    buffers: Sequence[Buffer],
    offsets: Sequence[int],
    *,
    height: int | None = None,
    may_share: Iterable[Pair] = (),
    must_share: Iterable[Pair] = (),
) -> None:
    """Refuse offsets that break alignment, a prescribed offset, a must-share pair or `height`, or let two buffers collide."""
    if len(offsets) != len(buffers):
        raise BadInput(f"the packing places {len(offsets)} buffers, but there are {len(buffers)}: it belongs to another problem.")
    for buffer, at in zip(buffers, offsets, strict=True):
        _check_place(buffer, at, height)
    place = {b.id: k for k, b in enumerate(buffers)}
    must = list(must_share)
    for a, b in must:
        if offsets[place[a]] != offsets[place[b]]:
            raise BadInput(f"buffers {a} and {b} must share, but lie at {offsets[place[a]]} and {offsets[place[b]]}.")
    allowed = _group_shared(must)
    for a, b in may_share:
        allowed.setdefault(a, set()).add(b)
        allowed.setdefault(b, set()).add(a)
    for arena in sorted({b.arena for b in buffers}):
        _sweep([k for k, b in enumerate(buffers) if b.arena == arena and not b.is_empty], buffers, offsets, allowed)


def _check_place(buffer: Buffer, at: int, height: int | None) -> None:
    if at < 0 or (height is not None and at + buffer.size > height):
        raise BadInput(f"buffer {buffer.id} lies at [{at}, {at + buffer.size}), outside the arena of {height} bytes.")
    if at % buffer.alignment:
        raise BadInput(f"buffer {buffer.id} lies at {at}, which is no multiple of its alignment {buffer.alignment}.")
    if buffer.offset is not None and at != buffer.offset:
        raise BadInput(f"buffer {buffer.id} lies at {at}, but its offset is fixed at {buffer.offset}.")


def _group_shared(pairs: Iterable[Pair]) -> dict[str, set[str]]:
    """For each buffer the buffers it shares bytes with: if a shares with b and b with c, then a shares with c."""
    group: dict[str, set[str]] = {}
    for a, b in pairs:
        merged = group.get(a, {a}) | group.get(b, {b})
        for member in merged:
            group[member] = merged
    return {member: set(others) for member, others in group.items()}


def _sweep(solid: list[int], buffers: Sequence[Buffer], offsets: Sequence[int], allowed: Mapping[str, set[str]]) -> None:
    """Walk through time with the live buffers sorted by address; a newcomer may touch nobody it does not share with."""
    events = sorted([(buffers[k].start, 1, k) for k in solid] + [(buffers[k].stop, 0, k) for k in solid])
    active: list[tuple[int, int]] = []
    # of buffers that share an address range any number may be active there, so the look below goes by the tallest
    tallest = max((buffers[k].size for k in solid if buffers[k].id in allowed), default=0)
    for _, is_start, k in events:
        entry = (offsets[k], k)
        if not is_start:
            active.pop(bisect_left(active, entry))
            continue
        at = bisect_left(active, entry)
        low = at - 1
        while low >= 0 and (low == at - 1 or active[low][0] + tallest > offsets[k]):
            _refuse_collision(buffers, offsets, k, active[low][1], allowed)
            low -= 1
        high = at
        while high < len(active) and active[high][0] < offsets[k] + buffers[k].size:
            _refuse_collision(buffers, offsets, k, active[high][1], allowed)
            high += 1
        insort(active, entry)


def _refuse_collision(buffers: Sequence[Buffer], offsets: Sequence[int], a: int, b: int, allowed: Mapping[str, set[str]]) -> None:
    (at_a, at_b), (one, other) = (offsets[a], offsets[b]), (buffers[a], buffers[b])
    if at_a >= at_b + other.size or at_b >= at_a + one.size:
        return
    if other.id in allowed.get(one.id, ()) and at_a == at_b:
        return
    raise BadInput(
        f"buffers {one.id} and {other.id} are alive together and share addresses: "
        f"[{at_a}, {at_a + one.size}) and [{at_b}, {at_b + other.size}); the overlap is "
        f"{format_bytes(min(at_a + one.size, at_b + other.size) - max(at_a, at_b))}."
    )
