# mypy: disable-error-code="untyped-decorator, no-any-return"
"""The compiled inside of the exact search: one loop over an explicit stack, everything in a few integer tables.

A *frame* is a component (a range of sections with its unplaced buffers) and the child it is trying. Placing a buffer raises
the least address of its unplaced neighbours; every change goes on the *trail* and is undone from there. The components
left by a placement wait in `pending`; each becomes a frame, and when one fails the search returns to the frame whose
placement made it, however many finished siblings lie between.

Where in the flow: called by `exact.Search.advance` only. See `exact.py` for the rules. The tables are plain arrays, not
objects, because every field of an object passed between compiled functions costs compile time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.jit.kernel import kernel, kernel_helper

PARTITION, CANONICAL, DOMINANCE, SECTION, FLOOR, LIFT, FILL, TWINS, MEMO = 1, 2, 4, 8, 16, 32, 64, 128, 256
# columns of `table`, one row per buffer: what never changes, then what the search changes, then scratch
SIZE, ALIGN, FIRST, LAST, MEETS, MEETS_END, TWIN, CEILING, RANK, OFFSET, PLACED = range(11)
TABLE_COLUMNS = 11
# columns of `frames`, one row per level of the search
BASE, COUNT, NEXT, PARENT, CHILD, TRAIL_MARK, PENDING_MARK, LOWEST_TOP, FROM, TO, HASH_A, HASH_B = range(12)
FRAME_COLUMNS = 12
TOP, TRAIL, PENDING, NODES, OPENING, DEEPEST = range(6)  # the registers
NUM_REGISTERS = 6
SKYLINE, LOAD, CROWD, TIGHT = range(4)  # rows of `sections`
KEY, ORDER, END, SORTED, CONCERNED = range(5)  # rows of `scratch`
FAR = 4611686018427387904
FILL_PASSES = 2


@kernel
def resume(
    table: Any, meets: Any, sections: Any, ends: Any, frames: Any, members: Any, visit: Any, trail: Any, pending: Any,
    scratch: Any, memo: Any, registers: Any, capacity: int, rules: int, flush_first: bool, num_nodes: int,
) -> int:  # fmt: skip
    """Search on for `num_nodes` placements. 0: not finished, 1: packed, 2: impossible."""
    stop = registers[NODES] + num_nodes
    while registers[NODES] < stop:
        if registers[OPENING]:
            if registers[PENDING] == 0:
                return 1
            registers[OPENING] = 0
            frame = _open_frame(table, frames, members, pending, registers, rules)
            _order_children(table, sections, frames, members, visit, scratch[KEY], frame, flush_first)
            if not rules & MEMO or not _failed_before(table, frames, members, memo, frame):
                continue
            registers[TOP] = frames[frame, PARENT]
        top = registers[TOP]
        if top < 0:
            return 2
        if frames[top, CHILD] >= 0:
            _undo(table, sections, frames, trail, registers, top)
        position = _next_child(table, frames, members, visit, rules, top)
        if position < 0:
            if rules & MEMO:
                slot = frames[top, HASH_A] & (len(memo) - 1)
                memo[slot, 0], memo[slot, 1] = frames[top, HASH_A], frames[top, HASH_B]
            registers[TOP] = frames[top, PARENT]
            continue
        registers[NODES] += 1
        buffer = members[frames[top, BASE] + position]
        frames[top, CHILD], frames[top, TRAIL_MARK], frames[top, PENDING_MARK] = buffer, registers[TRAIL], registers[PENDING]
        if not _place(table, meets, sections, trail, registers, buffer):
            continue
        left = _unplaced(table, meets, frames, members, scratch, rules, top, position)
        if left >= 0 and _fits(table, sections, ends, frames, scratch, capacity, rules, top, left):
            _push_components(table, sections[LOAD], frames, pending, scratch[ORDER], registers, rules, top, left)
            registers[OPENING] = 1
    return 0


@kernel_helper
def _undo(table: Any, sections: Any, frames: Any, trail: Any, registers: Any, frame: int) -> None:
    """Take back what this frame's placement, and everything after it, changed."""
    length = registers[TRAIL]
    while length > frames[frame, TRAIL_MARK]:
        length -= 1
        what = trail[length, 0]
        if what < 0:
            table[-1 - what, PLACED] = 0
        elif what < len(table):
            table[what, OFFSET] = trail[length, 1]
        else:
            sections[SKYLINE, what - len(table)] = trail[length, 1]
    registers[TRAIL] = length
    registers[PENDING] = frames[frame, PENDING_MARK]
    frames[frame, CHILD] = -1


@kernel_helper
def _next_child(table: Any, frames: Any, members: Any, visit: Any, rules: int, frame: int) -> int:
    """The position in the frame's members of the next buffer to try, or -1."""
    base, position = frames[frame, BASE], frames[frame, NEXT]
    while position < frames[frame, COUNT]:
        chosen = visit[base + position]
        buffer = members[base + chosen]
        position += 1
        if rules & DOMINANCE and table[buffer, OFFSET] >= frames[frame, LOWEST_TOP]:
            continue
        if rules & TWINS and table[buffer, TWIN] >= 0 and table[table[buffer, TWIN], PLACED] == 0:
            continue
        frames[frame, NEXT] = position
        return chosen
    return -1


@kernel_helper
def _place(table: Any, meets: Any, sections: Any, trail: Any, registers: Any, buffer: int) -> bool:
    """Put the buffer at its least address and raise its unplaced neighbours; False if one no longer fits."""
    length = registers[TRAIL]
    top = table[buffer, OFFSET] + table[buffer, SIZE]
    table[buffer, PLACED] = 1
    trail[length, 0] = -1 - buffer
    length += 1
    fits = table[buffer, OFFSET] <= table[buffer, CEILING]
    for section in range(table[buffer, FIRST], table[buffer, LAST]):
        trail[length, 0], trail[length, 1] = len(table) + section, sections[SKYLINE, section]
        length += 1
        sections[SKYLINE, section] = top
    for k in range(table[buffer, MEETS], table[buffer, MEETS_END]):
        other = meets[k]
        if table[other, PLACED] == 0 and table[other, OFFSET] < top:
            trail[length, 0], trail[length, 1] = other, table[other, OFFSET]
            length += 1
            align = table[other, ALIGN]
            table[other, OFFSET] = top if align == 1 else -(-top // align) * align
            if table[other, OFFSET] > table[other, CEILING]:
                fits = False
                break
    registers[TRAIL] = length
    return fits


@kernel_helper
def _unplaced(table: Any, meets: Any, frames: Any, members: Any, scratch: Any, rules: int, frame: int, position: int) -> int:
    """List the frame's unplaced buffers with the least address each can really have; -1 if one has none.

    A buffer before `position` whose turn is past was passed over: FLOOR and LIFT say how far up it must go.
    """
    base = frames[frame, BASE]
    now = table[members[base + position], OFFSET]
    count = 0
    for k in range(frames[frame, COUNT]):
        buffer = members[base + k]
        if table[buffer, PLACED]:
            continue
        key = table[buffer, OFFSET]
        if rules & CANONICAL and k < position and key <= now:
            if rules & FLOOR:
                key = now
            if rules & LIFT:
                key = max(key, _rest(table, meets, buffer, now))
            if key > table[buffer, CEILING]:
                return -1
        scratch[KEY, count], scratch[ORDER, count] = key, buffer
        count += 1
    return count


@kernel_helper
def _rest(table: Any, meets: Any, buffer: int, now: int) -> int:
    """The lowest top on which a passed-over buffer can come to rest: that of a neighbour which takes its present place."""
    lowest = FAR
    top = table[buffer, OFFSET] + table[buffer, SIZE]
    for k in range(table[buffer, MEETS], table[buffer, MEETS_END]):
        other = meets[k]
        if table[other, PLACED] == 0:
            at = max(table[other, OFFSET], now)
            if at < top:
                lowest = min(lowest, at + table[other, SIZE])
    return lowest


@kernel_helper
def _fits(table: Any, sections: Any, ends: Any, frames: Any, scratch: Any, capacity: int, rules: int, frame: int, count: int) -> bool:
    first, last = frames[frame, FROM], frames[frame, TO]
    for _ in range(FILL_PASSES + 1):
        limit = capacity if rules & SECTION else FAR
        if not _sections_fit(table, sections, first, last, scratch, limit, capacity, count):
            return False
        if not rules & FILL:
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
    load, tight = sections[LOAD], sections[TIGHT]
    load[first:last] = 0
    _sort(scratch[KEY], scratch[SORTED], count)
    for k in range(count - 1, -1, -1):
        which = scratch[SORTED, k]
        buffer = scratch[ORDER, which]
        key, size = scratch[KEY, which], table[buffer, SIZE]
        for section in range(table[buffer, FIRST], table[buffer, LAST]):
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
    load, crowd, tight = sections[LOAD], sections[CROWD], sections[TIGHT]  # loads are zero: `_sections_fit` leaves them so
    num = np.int64(0)  # a plain 0 would have `_sort` compiled twice
    for k in range(count):
        buffer = scratch[ORDER, k]
        concerned = False
        for section in range(table[buffer, FIRST], table[buffer, LAST]):
            if tight[section]:
                concerned = True
                crowd[section] = 0
        if concerned:
            scratch[CONCERNED, num], scratch[END, num] = k, scratch[KEY, k] + table[buffer, SIZE]
            num += 1
    _sort(scratch[END], scratch[SORTED], num)
    for k in range(num):
        which = scratch[SORTED, k]
        buffer = scratch[ORDER, scratch[CONCERNED, which]]
        for section in range(table[buffer, FIRST], table[buffer, LAST]):
            if tight[section]:
                load[section] += table[buffer, SIZE]
                ends[section, crowd[section], 0] = scratch[END, which]
                ends[section, crowd[section], 1] = load[section]
                crowd[section] += 1
    rose = 0
    for k in range(num):
        position = scratch[CONCERNED, k]
        buffer = scratch[ORDER, position]
        key = scratch[KEY, position]
        for section in range(table[buffer, FIRST], table[buffer, LAST]):
            if tight[section] and load[section] - capacity + key > 0:
                key = _supported(ends[section], crowd[section], load[section] - capacity, key, scratch[END, k], table[buffer, SIZE])
        if key > table[buffer, CEILING]:
            return -1
        if key > scratch[KEY, position]:
            scratch[KEY, position], rose = key, 1
    return rose


@kernel_helper
def _supported(ends: Any, crowd: int, excess: int, key: int, own_end: int, own_size: int) -> int:
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
    first, last = frames[frame, FROM], frames[frame, TO]
    held[first:last] = 0 if rules & PARTITION else 1  # 1: a buffer of the section before reaches in here, 2: one begins here
    for k in range(count):
        buffer = order[k]
        for section in range(table[buffer, FIRST] + 1, table[buffer, LAST]):
            held[section] = 1
        if held[table[buffer, FIRST]] == 0:
            held[table[buffer, FIRST]] = 2
    if count and not rules & PARTITION:
        held[first] = 2
    begin = -1
    for section in range(first, last + 1):
        if section == last or held[section] != 1:
            if begin >= 0:
                slot = registers[PENDING]
                pending[slot, 0], pending[slot, 1], pending[slot, 2] = begin, section, frame
                registers[PENDING] = slot + 1
            begin = section if section < last and held[section] == 2 else -1


@kernel_helper
def _before(table: Any, a: Any, b: Any) -> bool:
    return table[a, OFFSET] < table[b, OFFSET] or (table[a, OFFSET] == table[b, OFFSET] and table[a, RANK] < table[b, RANK])


@kernel_helper
def _open_frame(table: Any, frames: Any, members: Any, pending: Any, registers: Any, rules: int) -> int:
    """Turn the last pending component into a frame: its unplaced buffers by (address, rank)."""
    registers[PENDING] -= 1
    slot, above = registers[PENDING], registers[TOP]
    first, last, parent = pending[slot, 0], pending[slot, 1], pending[slot, 2]
    base = frames[above, BASE] + frames[above, COUNT] if above >= 0 else 0
    count, lowest_top = 0, FAR
    for k in range(frames[parent, COUNT] if parent >= 0 else len(table)):
        buffer = members[frames[parent, BASE] + k] if parent >= 0 else k
        if table[buffer, PLACED] or table[buffer, FIRST] < first or table[buffer, LAST] > last:
            continue
        lowest_top = min(lowest_top, table[buffer, OFFSET] + table[buffer, SIZE])
        at = base + count  # insertion sort: the parent's list is nearly sorted
        while at > base and _before(table, buffer, np.int64(members[at - 1])):
            members[at] = members[at - 1]
            at -= 1
        members[at] = buffer
        count += 1
    passed = 0
    if rules & CANONICAL and parent >= 0:
        while passed < count and _before(table, np.int64(members[base + passed]), frames[parent, CHILD]):
            passed += 1
    frame = above + 1
    frames[frame, BASE], frames[frame, COUNT], frames[frame, NEXT], frames[frame, PARENT] = base, count, passed, parent
    frames[frame, CHILD], frames[frame, LOWEST_TOP], frames[frame, FROM], frames[frame, TO] = -1, lowest_top, first, last
    registers[TOP] = frame
    registers[DEEPEST] = max(registers[DEEPEST], frame)  # every frame below this one has placed a buffer
    return frame


@kernel_helper
def _order_children(table: Any, sections: Any, frames: Any, members: Any, visit: Any, score: Any, frame: int, flush_first: bool) -> None:
    """By address and rank; with `flush_first`, at equal addresses those that touch walls on more sides first."""
    base, passed = frames[frame, BASE], frames[frame, NEXT]
    for k in range(frames[frame, COUNT]):
        visit[base + k] = k
    if not flush_first:
        return
    for k in range(passed, frames[frame, COUNT]):
        buffer = members[base + k]
        at, first, last = table[buffer, OFFSET], table[buffer, FIRST], table[buffer, LAST]
        if at >= frames[frame, LOWEST_TOP]:
            break
        walls = 1 if first == 0 or sections[SKYLINE, first - 1] > at else 0
        walls += 1 if last == sections.shape[1] - 1 or sections[SKYLINE, last] > at else 0
        score[k] = walls
        slot = k
        while slot > passed:
            other = visit[base + slot - 1]
            if table[members[base + other], OFFSET] != at or score[other] >= walls:
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
def _failed_before(table: Any, frames: Any, members: Any, memo: Any, frame: int) -> bool:
    """Look the component up by who is unplaced, where each may lie and who was passed over: that decides what follows."""
    base, passed, parent = frames[frame, BASE], frames[frame, NEXT], frames[frame, PARENT]
    hash_a, hash_b = np.uint64(0), np.uint64(0)
    for k in range(frames[frame, COUNT]):
        buffer = members[base + k]
        word = np.uint64(buffer) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(table[buffer, OFFSET]) * np.uint64(2)
        word = _mix(word + np.uint64(1 if k < passed else 0))
        hash_a += word
        hash_b += _mix(word + np.uint64(12345))
    if passed > 0:
        word = _mix(np.uint64(table[frames[parent, CHILD], OFFSET]) + np.uint64(777))
        hash_a += word
        hash_b += _mix(word)
    frames[frame, HASH_A], frames[frame, HASH_B] = np.int64(hash_a), np.int64(hash_b)
    slot = frames[frame, HASH_A] & (len(memo) - 1)
    return memo[slot, 0] == frames[frame, HASH_A] and memo[slot, 1] == frames[frame, HASH_B]
