"""Buffers that share memory: must-share sets become one block, may-share pairs do when that makes the packing lower.

    x ├────────────┤              relu(x) in place:       block ├─────────────────────┤
    y            ├──────────┤     x and y may share              one buffer, the larger size, both lives

Where in the flow: `api.pack` turns buffers into blocks before solving. Sharing means the same first address, because a
kernel that overwrites its input does so element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.core.errors import BadInput
from memfit.core.packing import Buffer, Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Buffers at one address. `is_box`: it takes its full size over its whole life, so that nothing is given away."""

    members: tuple[int, ...]
    start: int
    stop: int
    size: int
    alignment: int
    offset: int | None
    arena: int
    is_box: bool


def find_positions(pairs: Iterable[Pair], buffers: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Pairs of ids as pairs of positions."""
    place = {b.id: k for k, b in enumerate(buffers)}
    result = []
    for pair in pairs:
        for name in pair:
            if name not in place:
                raise BadInput(f"the pair {pair} names buffer {name!r}, which is not among the {len(buffers)} buffers.")
        a, b = place[pair[0]], place[pair[1]]
        if buffers[a].arena != buffers[b].arena:
            raise BadInput(f"buffers {pair[0]} and {pair[1]} share memory but are in arenas {buffers[a].arena} and {buffers[b].arena}.")
        result.append((a, b))
    return result


def make_blocks(buffers: Sequence[Buffer], must: Sequence[tuple[int, int]], may: Sequence[tuple[int, int]] = ()) -> tuple[Block, ...]:
    """Blocks of the must-share sets, with the may-share pairs of `may` merged as far as every meeting inside is allowed."""
    sets = [[k] for k in range(len(buffers))]
    home = list(range(len(buffers)))
    for a, b in must:
        _merge(sets, home, a, b)
    allowed = {frozenset(p) for p in may} | {frozenset((a, b)) for s in sets for a in s for b in s if len(s) > 1 and a < b}
    for a, b in may:
        if home[a] != home[b] and all(
            frozenset((x, y)) in allowed or not _meet(buffers[x], buffers[y]) for x in sets[home[a]] for y in sets[home[b]]
        ):
            _merge(sets, home, a, b)
    return tuple(_make_block(buffers, members) for members in sets if members)


def _merge(sets: list[list[int]], home: list[int], a: int, b: int) -> None:
    into, gone = home[a], home[b]
    if into != gone:
        for k in sets[gone]:
            home[k] = into
        sets[into] += sets[gone]
        sets[gone] = []


def _meet(a: Buffer, b: Buffer) -> bool:
    return a.start < b.stop and b.start < a.stop


def _make_block(buffers: Sequence[Buffer], members: list[int]) -> Block:
    group = [buffers[k] for k in members]
    solid = [b for b in group if not b.is_empty] or group
    prescribed = {b.offset for b in group if b.offset is not None}
    if len(prescribed) > 1:
        raise BadInput(
            f"buffers {', '.join(b.id for b in group if b.offset is not None)} must share, but their offsets are fixed at {sorted(prescribed)}."
        )
    alignment = math.lcm(*(b.alignment for b in group))
    offset = prescribed.pop() if prescribed else None
    if offset is not None and offset % alignment:
        raise BadInput(f"buffer {group[0].id} is fixed at {offset}, which is no multiple of the alignment {alignment}.")
    start, stop, size = min(b.start for b in solid), max(b.stop for b in solid), max(b.size for b in solid)
    return Block(
        members=tuple(members),
        start=start,
        stop=stop,
        size=size,
        alignment=alignment,
        offset=offset,
        arena=group[0].arena,
        is_box=_covers([b for b in solid if b.size == size], start, stop),
    )


def _covers(tall: list[Buffer], start: int, stop: int) -> bool:
    reached = start
    for b in sorted(tall, key=lambda b: b.start):
        if b.start > reached:
            return False
        reached = max(reached, b.stop)
    return reached >= stop


def measure_shared_load(buffers: Sequence[Buffer], must: Sequence[tuple[int, int]], may: Sequence[tuple[int, int]]) -> int:
    """The most bytes alive at once when all that may share does: of those that hang together then, the largest counts.

    A bound for every choice of sharing. Walks through time once, looking again only at the set that changed.
    """
    sets, home = [[k] for k in range(len(buffers))], list(range(len(buffers)))
    links: dict[int, set[int]] = {}
    for a, b in [*must, *may]:
        _merge(sets, home, a, b)
    for a, b in may:
        links.setdefault(a, set()).add(b)
        links.setdefault(b, set()).add(a)
    for group in make_blocks(buffers, must):
        for k in group.members:
            if len(group.members) > 1:
                links.setdefault(k, set()).update(x for x in group.members if x != k)
    events = sorted([(b.stop, 0, k) for k, b in enumerate(buffers) if not b.is_empty] + [
        (b.start, 1, k) for k, b in enumerate(buffers) if not b.is_empty
    ])  # fmt: skip
    alive: dict[int, set[int]] = {}
    held: dict[int, int] = {}
    total = peak = 0
    for _, is_birth, k in events:
        group_alive = alive.setdefault(home[k], set())
        (group_alive.add if is_birth else group_alive.discard)(k)
        now = _least_bytes(buffers, group_alive, links)
        total += now - held.get(home[k], 0)
        held[home[k]] = now
        peak = max(peak, total)
    return peak


def _least_bytes(buffers: Sequence[Buffer], alive: set[int], links: dict[int, set[int]]) -> int:
    total, seen = 0, set[int]()
    for k in alive:
        if k in seen:
            continue
        stack, largest = [k], 0
        seen.add(k)
        while stack:
            x = stack.pop()
            largest = max(largest, buffers[x].size)
            for y in links.get(x, ()):
                if y in alive and y not in seen:
                    seen.add(y)
                    stack.append(y)
        total += largest
    return total
