# mypy: disable-error-code="untyped-decorator, no-any-return"
"""The compiled inside of the exact search: one loop over an explicit stack, everything in a few integer tables.

A *frame* is a component (a range of sections with its unplaced buffers) and the child it is trying. Placing a buffer raises
the least address of its unplaced neighbours; every change goes on the *trail* and is undone from there. The components
left by a placement wait in `pending`; each becomes a frame, and when one fails the search returns to the frame whose
placement made it, however many finished siblings lie between.

Where in the flow: called by `Search.advance` of `search.py` only, which lists the rules. The tables are plain arrays, not
objects, because every field of an object passed between compiled functions costs compile time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from memfit.jit.kernel import kernel, kernel_helper


class _Rules(NamedTuple):
    partition: int = 1
    canonical: int = 2
    dominance: int = 4
    section: int = 8
    floor: int = 16
    lift: int = 32
    fill: int = 64
    twins: int = 128
    memo: int = 256


class _Buffer(NamedTuple):
    size: int = 0  # what never changes
    align: int = 1
    first: int = 2  # its first section
    last: int = 3  # the section after its last
    meets: int = 4  # where its neighbours begin in `meets`
    meets_end: int = 5
    twin: int = 6  # an earlier buffer that could be exchanged with this one, -1 for none
    ceiling: int = 7  # the highest address it may have
    rank: int = 8  # its place among equals
    offset: int = 9  # the least address it can have now: what the search changes
    placed: int = 10


class _Frame(NamedTuple):
    base: int = 0  # where its buffers begin in `members`
    num_buffers: int = 1
    next: int = 2  # position of the next buffer to try
    parent: int = 3  # the frame whose placement made it
    child: int = 4  # the buffer being tried
    trail_mark: int = 5  # how far back to undo
    pending_mark: int = 6
    lowest_top: int = 7  # no buffer placed first lies higher than this
    first: int = 8  # its first section
    last: int = 9  # the section after its last
    hash_a: int = 10  # of the component, for the memo
    hash_b: int = 11


class _Register(NamedTuple):
    top: int = 0  # the frame at work
    trail: int = 1  # length of the trail
    pending: int = 2  # components that wait
    nodes: int = 3  # placements so far
    opening: int = 4  # whether a component is to be opened next
    deepest: int = 5  # most buffers ever placed at once


class _Section(NamedTuple):
    skyline: int = 0  # height of what is placed
    load: int = 1  # bytes, for the moment
    crowd: int = 2  # buffers, for the moment
    tight: int = 3  # whether what must lie here hardly fits


class _Scratch(NamedTuple):
    key: int = 0  # least address each buffer can really have
    order: int = 1  # the buffers
    end: int = 2  # least address of its top
    sorted: int = 3  # positions by key or end
    concerned: int = 4  # positions of buffers in tight sections


RULE = _Rules()
"""Bits of `rules`; `search.Rule` has the same ones."""
BUFFER, FRAME = _Buffer(), _Frame()
"""Columns of `table`, one row per buffer, and of `frames`, one row per level of the search."""
REGISTER, SECTION, SCRATCH = _Register(), _Section(), _Scratch()
"""Places in `registers`, rows of `sections` and of `scratch`."""
FAR = 4611686018427387904
FILL_PASSES = 2


@kernel
def resume(
    table: Any, meets: Any, sections: Any, ends: Any, frames: Any, members: Any, visit: Any, trail: Any, pending: Any,
    scratch: Any, memo: Any, registers: Any, capacity: int, rules: int, flush_first: bool, num_nodes: int,
) -> int:  # fmt: skip
    """Search on for `num_nodes` placements. 0: not finished, 1: packed, 2: impossible."""
    stop = registers[REGISTER.nodes] + num_nodes
    while registers[REGISTER.nodes] < stop:
        if registers[REGISTER.opening]:
            if registers[REGISTER.pending] == 0:
                return 1
            registers[REGISTER.opening] = 0
            frame = _open_frame(table, frames, members, pending, registers, rules)
            _order_children(table, sections, frames, members, visit, scratch[SCRATCH.key], frame, flush_first)
            if not rules & RULE.memo or not _has_failed(table, frames, members, memo, frame):
                continue
            registers[REGISTER.top] = frames[frame, FRAME.parent]
        top = registers[REGISTER.top]
        if top < 0:
            return 2
        if frames[top, FRAME.child] >= 0:
            _undo(table, sections, frames, trail, registers, top)
        position = _next_child(table, frames, members, visit, rules, top)
        if position < 0:
            if rules & RULE.memo:
                slot = frames[top, FRAME.hash_a] & (len(memo) - 1)
                memo[slot, 0], memo[slot, 1] = frames[top, FRAME.hash_a], frames[top, FRAME.hash_b]
            registers[REGISTER.top] = frames[top, FRAME.parent]
            continue
        registers[REGISTER.nodes] += 1
        buffer = members[frames[top, FRAME.base] + position]
        frames[top, FRAME.child], frames[top, FRAME.trail_mark], frames[top, FRAME.pending_mark] = (
            buffer,
            registers[REGISTER.trail],
            registers[REGISTER.pending],
        )
        if not _place(table, meets, sections, trail, registers, buffer):
            continue
        left = _list_unplaced(table, meets, frames, members, scratch, rules, top, position)
        if left >= 0 and _fits(table, sections, ends, frames, scratch, capacity, rules, top, left):
            _push_components(table, sections[SECTION.load], frames, pending, scratch[SCRATCH.order], registers, rules, top, left)
            registers[REGISTER.opening] = 1
    return 0


@kernel_helper
def _undo(table: Any, sections: Any, frames: Any, trail: Any, registers: Any, frame: int) -> None:
    """Take back what this frame's placement, and everything after it, changed."""
    length = registers[REGISTER.trail]
    while length > frames[frame, FRAME.trail_mark]:
        length -= 1
        what = trail[length, 0]
        if what < 0:
            table[-1 - what, BUFFER.placed] = 0
        elif what < len(table):
            table[what, BUFFER.offset] = trail[length, 1]
        else:
            sections[SECTION.skyline, what - len(table)] = trail[length, 1]
    registers[REGISTER.trail] = length
    registers[REGISTER.pending] = frames[frame, FRAME.pending_mark]
    frames[frame, FRAME.child] = -1


@kernel_helper
def _next_child(table: Any, frames: Any, members: Any, visit: Any, rules: int, frame: int) -> int:
    """The position in the frame's members of the next buffer to try, or -1."""
    base, position = frames[frame, FRAME.base], frames[frame, FRAME.next]
    while position < frames[frame, FRAME.num_buffers]:
        chosen = visit[base + position]
        buffer = members[base + chosen]
        position += 1
        if rules & RULE.dominance and table[buffer, BUFFER.offset] >= frames[frame, FRAME.lowest_top]:
            continue
        if rules & RULE.twins and table[buffer, BUFFER.twin] >= 0 and table[table[buffer, BUFFER.twin], BUFFER.placed] == 0:
            continue
        frames[frame, FRAME.next] = position
        return chosen
    return -1


@kernel_helper
def _place(table: Any, meets: Any, sections: Any, trail: Any, registers: Any, buffer: int) -> bool:
    """Put the buffer at its least address and raise its unplaced neighbours; False if one no longer fits."""
    length = registers[REGISTER.trail]
    top = table[buffer, BUFFER.offset] + table[buffer, BUFFER.size]
    table[buffer, BUFFER.placed] = 1
    trail[length, 0] = -1 - buffer
    length += 1
    fits = table[buffer, BUFFER.offset] <= table[buffer, BUFFER.ceiling]
    for section in range(table[buffer, BUFFER.first], table[buffer, BUFFER.last]):
        trail[length, 0], trail[length, 1] = len(table) + section, sections[SECTION.skyline, section]
        length += 1
        sections[SECTION.skyline, section] = top
    for k in range(table[buffer, BUFFER.meets], table[buffer, BUFFER.meets_end]):
        other = meets[k]
        if table[other, BUFFER.placed] == 0 and table[other, BUFFER.offset] < top:
            trail[length, 0], trail[length, 1] = other, table[other, BUFFER.offset]
            length += 1
            align = table[other, BUFFER.align]
            table[other, BUFFER.offset] = top if align == 1 else -(-top // align) * align
            if table[other, BUFFER.offset] > table[other, BUFFER.ceiling]:
                fits = False
                break
    registers[REGISTER.trail] = length
    return fits


@kernel_helper
def _list_unplaced(table: Any, meets: Any, frames: Any, members: Any, scratch: Any, rules: int, frame: int, position: int) -> int:
    """List the frame's unplaced buffers with the least address each can really have; -1 if one has none.

    A buffer before `position` whose turn is past was passed over: FLOOR and LIFT say how far up it must go.
    """
    base = frames[frame, FRAME.base]
    now = table[members[base + position], BUFFER.offset]
    count = 0
    for k in range(frames[frame, FRAME.num_buffers]):
        buffer = members[base + k]
        if table[buffer, BUFFER.placed]:
            continue
        key = table[buffer, BUFFER.offset]
        if rules & RULE.canonical and k < position and key <= now:
            if rules & RULE.floor:
                key = now
            if rules & RULE.lift:
                key = max(key, _find_rest(table, meets, buffer, now))
            if key > table[buffer, BUFFER.ceiling]:
                return -1
        scratch[SCRATCH.key, count], scratch[SCRATCH.order, count] = key, buffer
        count += 1
    return count


@kernel_helper
def _find_rest(table: Any, meets: Any, buffer: int, now: int) -> int:
    """The lowest top on which a passed-over buffer can come to rest: that of a neighbour which takes its present place."""
    lowest = FAR
    top = table[buffer, BUFFER.offset] + table[buffer, BUFFER.size]
    for k in range(table[buffer, BUFFER.meets], table[buffer, BUFFER.meets_end]):
        other = meets[k]
        if table[other, BUFFER.placed] == 0:
            at = max(table[other, BUFFER.offset], now)
            if at < top:
                lowest = min(lowest, at + table[other, BUFFER.size])
    return lowest


@kernel_helper
def _fits(table: Any, sections: Any, ends: Any, frames: Any, scratch: Any, capacity: int, rules: int, frame: int, count: int) -> bool:
    first, last = frames[frame, FRAME.first], frames[frame, FRAME.last]
    for _ in range(FILL_PASSES + 1):
        limit = capacity if rules & RULE.section else FAR
        if not _sections_fit(table, sections, first, last, scratch, limit, capacity, count):
            return False
        if not rules & RULE.fill:
            return True
        change = _fill(table, sections, ends, scratch, capacity, count)
        if change <= 0:
            return change == 0
    return True


@kernel_helper
def _sort(values: Any, positions: Any, count: Any) -> None:
    """Shell sort of the positions 0 .. count by their values: short lists, often nearly sorted."""
    for k in range(count):
        positions[k] = k
    gap = 1
    while gap * 3 < count:
        gap = gap * 3 + 1
    while gap > 0:
        for k in range(gap, count):
            moved = positions[k]
            at = k
            while at >= gap and values[positions[at - gap]] > values[moved]:
                positions[at] = positions[at - gap]
                at -= gap
            positions[at] = moved
        gap //= 3


@kernel_helper
def _sections_fit(table: Any, sections: Any, first: int, last: int, scratch: Any, limit: int, capacity: int, count: int) -> bool:
    """Highest key first, add sizes up per section: what must lie at or above a key has to fit under the limit.

    Also notes which sections are tight: where the highest key plus the load is above the capacity.
    """
    load, tight = sections[SECTION.load], sections[SECTION.tight]
    load[first:last] = 0
    _sort(scratch[SCRATCH.key], scratch[SCRATCH.sorted], count)
    for k in range(count - 1, -1, -1):
        which = scratch[SCRATCH.sorted, k]
        buffer = scratch[SCRATCH.order, which]
        key, size = scratch[SCRATCH.key, which], table[buffer, BUFFER.size]
        for section in range(table[buffer, BUFFER.first], table[buffer, BUFFER.last]):
            if load[section] == 0:
                tight[section] = key - capacity
            load[section] += size
            if load[section] + key > limit:
                return False
    for section in range(first, last):
        tight[section] = 1 if load[section] > 0 and load[section] + tight[section] > 0 else 0
        load[section] = 0
    return True


@kernel_helper
def _fill(table: Any, sections: Any, ends: Any, scratch: Any, capacity: int, count: int) -> int:
    """Raise keys until enough bytes can lie below each buffer; 1 if something rose, 0 if not, -1 if one rose too far.

    A buffer at v leaves capacity - v for itself and what lies above it, so in each of its sections at least
    load + v - capacity bytes must lie below it, made of buffers that can end by v. Only tight sections can say anything.
    """
    load, crowd, tight = (
        sections[SECTION.load],
        sections[SECTION.crowd],
        sections[SECTION.tight],
    )  # loads are zero: `_sections_fit` leaves them so
    num = np.int64(0)  # a plain 0 would have `_sort` compiled twice
    for k in range(count):
        buffer = scratch[SCRATCH.order, k]
        concerned = False
        for section in range(table[buffer, BUFFER.first], table[buffer, BUFFER.last]):
            if tight[section]:
                concerned = True
                crowd[section] = 0
        if concerned:
            scratch[SCRATCH.concerned, num], scratch[SCRATCH.end, num] = k, scratch[SCRATCH.key, k] + table[buffer, BUFFER.size]
            num += 1
    _sort(scratch[SCRATCH.end], scratch[SCRATCH.sorted], num)
    for k in range(num):
        which = scratch[SCRATCH.sorted, k]
        buffer = scratch[SCRATCH.order, scratch[SCRATCH.concerned, which]]
        for section in range(table[buffer, BUFFER.first], table[buffer, BUFFER.last]):
            if tight[section]:
                load[section] += table[buffer, BUFFER.size]
                ends[section, crowd[section], 0] = scratch[SCRATCH.end, which]
                ends[section, crowd[section], 1] = load[section]
                crowd[section] += 1
    rose = 0
    for k in range(num):
        position = scratch[SCRATCH.concerned, k]
        buffer = scratch[SCRATCH.order, position]
        key = scratch[SCRATCH.key, position]
        for section in range(table[buffer, BUFFER.first], table[buffer, BUFFER.last]):
            if tight[section] and load[section] - capacity + key > 0:
                key = _raise_to_support(
                    ends[section], crowd[section], load[section] - capacity, key, scratch[SCRATCH.end, k], table[buffer, BUFFER.size]
                )
        if key > table[buffer, BUFFER.ceiling]:
            return -1
        if key > scratch[SCRATCH.key, position]:
            scratch[SCRATCH.key, position], rose = key, 1
    return rose


@kernel_helper
def _raise_to_support(ends: Any, crowd: int, excess: int, key: int, own_end: int, own_size: int) -> int:
    """The least address from `key` up at which the ends below it add up to `excess` + address."""
    low, high = 0, crowd
    while low < high:
        middle = (low + high) >> 1
        if ends[middle, 0] <= key:
            low = middle + 1
        else:
            high = middle
    have = ends[low - 1, 1] if low > 0 else 0
    if own_end <= key:
        have -= own_size
    while have < excess + key:
        if low >= crowd:
            return FAR
        key = ends[low, 0]
        have = ends[low, 1] - (own_size if own_end <= key else 0)
        low += 1
    return key


@kernel_helper
def _push_components(
    table: Any, held: Any, frames: Any, pending: Any, order: Any, registers: Any, rules: int, frame: int, count: int
) -> None:  # fmt: skip
    """Queue the ranges of sections that unplaced buffers still hold together."""
    first, last = frames[frame, FRAME.first], frames[frame, FRAME.last]
    held[first:last] = 0 if rules & RULE.partition else 1  # 1: a buffer of the section before reaches in here, 2: one begins here
    for k in range(count):
        buffer = order[k]
        for section in range(table[buffer, BUFFER.first] + 1, table[buffer, BUFFER.last]):
            held[section] = 1
        if held[table[buffer, BUFFER.first]] == 0:
            held[table[buffer, BUFFER.first]] = 2
    if count and not rules & RULE.partition:
        held[first] = 2
    begin = -1
    for section in range(first, last + 1):
        if section == last or held[section] != 1:
            if begin >= 0:
                slot = registers[REGISTER.pending]
                pending[slot, 0], pending[slot, 1], pending[slot, 2] = begin, section, frame
                registers[REGISTER.pending] = slot + 1
            begin = section if section < last and held[section] == 2 else -1


@kernel_helper
def _is_before(table: Any, a: Any, b: Any) -> bool:
    return table[a, BUFFER.offset] < table[b, BUFFER.offset] or (
        table[a, BUFFER.offset] == table[b, BUFFER.offset] and table[a, BUFFER.rank] < table[b, BUFFER.rank]
    )


@kernel_helper
def _open_frame(table: Any, frames: Any, members: Any, pending: Any, registers: Any, rules: int) -> int:
    """Turn the last pending component into a frame: its unplaced buffers by (address, rank)."""
    registers[REGISTER.pending] -= 1
    slot, above = registers[REGISTER.pending], registers[REGISTER.top]
    first, last, parent = pending[slot, 0], pending[slot, 1], pending[slot, 2]
    base = frames[above, FRAME.base] + frames[above, FRAME.num_buffers] if above >= 0 else 0
    count, lowest_top = 0, FAR
    for k in range(frames[parent, FRAME.num_buffers] if parent >= 0 else len(table)):
        buffer = members[frames[parent, FRAME.base] + k] if parent >= 0 else k
        if table[buffer, BUFFER.placed] or table[buffer, BUFFER.first] < first or table[buffer, BUFFER.last] > last:
            continue
        lowest_top = min(lowest_top, table[buffer, BUFFER.offset] + table[buffer, BUFFER.size])
        at = base + count  # insertion sort: the parent's list is nearly sorted
        while at > base and _is_before(table, buffer, np.int64(members[at - 1])):
            members[at] = members[at - 1]
            at -= 1
        members[at] = buffer
        count += 1
    passed = 0
    if rules & RULE.canonical and parent >= 0:
        while passed < count and _is_before(table, np.int64(members[base + passed]), frames[parent, FRAME.child]):
            passed += 1
    frame = above + 1
    frames[frame, FRAME.base], frames[frame, FRAME.num_buffers], frames[frame, FRAME.next], frames[frame, FRAME.parent] = (
        base,
        count,
        passed,
        parent,
    )
    frames[frame, FRAME.child], frames[frame, FRAME.lowest_top], frames[frame, FRAME.first], frames[frame, FRAME.last] = (
        -1,
        lowest_top,
        first,
        last,
    )
    registers[REGISTER.top] = frame
    registers[REGISTER.deepest] = max(registers[REGISTER.deepest], frame)  # every frame below this one has placed a buffer
    return frame


@kernel_helper
def _order_children(table: Any, sections: Any, frames: Any, members: Any, visit: Any, score: Any, frame: int, flush_first: bool) -> None:
    """By address and rank; with `flush_first`, at equal addresses those that touch walls on more sides first."""
    base, passed = frames[frame, FRAME.base], frames[frame, FRAME.next]
    for k in range(frames[frame, FRAME.num_buffers]):
        visit[base + k] = k
    if not flush_first:
        return
    for k in range(passed, frames[frame, FRAME.num_buffers]):
        buffer = members[base + k]
        at, first, last = table[buffer, BUFFER.offset], table[buffer, BUFFER.first], table[buffer, BUFFER.last]
        if at >= frames[frame, FRAME.lowest_top]:
            break
        walls = 1 if first == 0 or sections[SECTION.skyline, first - 1] > at else 0
        walls += 1 if last == sections.shape[1] - 1 or sections[SECTION.skyline, last] > at else 0
        score[k] = walls
        slot = k
        while slot > passed:
            other = visit[base + slot - 1]
            if table[members[base + other], BUFFER.offset] != at or score[other] >= walls:
                break
            visit[base + slot] = other
            slot -= 1
        visit[base + slot] = k


@kernel_helper
def _mix(x: Any) -> Any:
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel_helper
def _has_failed(table: Any, frames: Any, members: Any, memo: Any, frame: int) -> bool:
    """Look the component up by who is unplaced, where each may lie and who was passed over: that decides what follows."""
    base, passed, parent = frames[frame, FRAME.base], frames[frame, FRAME.next], frames[frame, FRAME.parent]
    hash_a, hash_b = np.uint64(0), np.uint64(0)
    for k in range(frames[frame, FRAME.num_buffers]):
        buffer = members[base + k]
        word = np.uint64(buffer) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(table[buffer, BUFFER.offset]) * np.uint64(2)
        word = _mix(word + np.uint64(1 if k < passed else 0))
        hash_a += word
        hash_b += _mix(word + np.uint64(12345))
    if passed > 0:
        word = _mix(np.uint64(table[frames[parent, FRAME.child], BUFFER.offset]) + np.uint64(777))
        hash_a += word
        hash_b += _mix(word)
    frames[frame, FRAME.hash_a], frames[frame, FRAME.hash_b] = np.int64(hash_a), np.int64(hash_b)
    slot = frames[frame, FRAME.hash_a] & (len(memo) - 1)
    return memo[slot, 0] == frames[frame, FRAME.hash_a] and memo[slot, 1] == frames[frame, FRAME.hash_b]
