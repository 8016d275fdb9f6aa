"""`pack`: buffers in, a judged packing with its bound and status out.

    buffers ──> checked ──> blocks (what shares) ──> one problem per arena ──> solve ──> judge ──> Packing

Where in the flow: the public door of this folder; the command line and the benchmarks come through here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.outcome import Status
from memfit.core.packing import Buffer, Packing, Pair, check_packing
from memfit.core.units import MAX_BYTES, format_bytes
from memfit.offsets.problem import Ints, Problem, make_problem
from memfit.offsets.shared_blocks import Block, find_positions, make_blocks, measure_shared_load
from memfit.offsets.solve_arena import Solution, solve

_MAX_TOTAL_BYTES = 2**61  # addresses and their sums stay inside 64 bits with room to spare
_QUICK_S = 0.0


def pack(
    buffers: Sequence[Buffer],
    capacity: int | None = None,
    time_limit_s: float = 30.0,
    *,
    may_share: Sequence[Pair] = (),
    must_share: Sequence[Pair] = (),
    num_threads: int | None = None,
    seed: int = 0,
) -> Packing:
    """Place every buffer so that no two alive together share addresses, below `capacity` or as low as possible.

    `capacity` holds for each arena. `may_share` and `must_share` are pairs of ids that may or must begin at the same address
    even while both are alive. The answer is judged before it is returned; its status is proven where it says so.
    """
    began = time.monotonic()
    buffers = tuple(buffers)
    check_buffers(buffers, capacity, time_limit_s)
    must, may = find_positions(must_share, buffers), find_positions(may_share, buffers)
    deadline = began + time_limit_s
    blocks = _choose_blocks(buffers, must, may, capacity)
    solutions = _solve_arenas(blocks, capacity, deadline, num_threads, seed)
    packing = _make_packing(buffers, blocks, solutions, must, may, capacity, began)
    check_packing(buffers, packing.offsets, height=packing.height, may_share=may_share, must_share=must_share)
    return packing


def check_buffers(buffers: Sequence[Buffer], capacity: int | None, time_limit_s: float) -> None:
    """Refuse what cannot be a problem, naming the buffer."""
    if capacity is not None and not 0 <= capacity <= MAX_BYTES:
        raise BadInput(f"capacity {capacity} is not a number of bytes between 0 and 2**63 - 1.")
    if not time_limit_s >= 0:
        raise BadInput(f"time limit {time_limit_s} is not a number of seconds: give 0 or more.")
    seen: set[str] = set()
    total = 0
    for b in buffers:
        if b.id in seen:
            raise BadInput(f"buffer {b.id!r} appears twice: ids must differ.")
        seen.add(b.id)
        if b.stop < b.start:
            raise BadInput(f"buffer {b.id!r} stops at {b.stop}, before it starts at {b.start}.")
        if max(abs(b.start), abs(b.stop)) > 2**61:
            raise BadInput(f"buffer {b.id!r} lives over [{b.start}, {b.stop}), beyond the times memfit can count (2**61).")
        if b.size < 0 or b.alignment < 1 or (b.offset is not None and b.offset < 0):
            raise BadInput(
                f"buffer {b.id!r} has size {b.size}, alignment {b.alignment}, offset {b.offset}: sizes and offsets start at 0, alignments at 1."
            )
        total += b.size + b.alignment + (b.offset or 0)
    if total > _MAX_TOTAL_BYTES:
        raise BadInput(f"the buffers add up to {format_bytes(total)}, more than the {format_bytes(_MAX_TOTAL_BYTES)} memfit can address.")


def _choose_blocks(
    buffers: Sequence[Buffer], must: list[tuple[int, int]], may: list[tuple[int, int]], capacity: int | None
) -> tuple[Block, ...]:
    """Share all that may, or nothing, or all but some: whatever a quick packing says is lowest."""
    if not may:
        return make_blocks(buffers, must)
    chosen = sorted(may, key=lambda p: -min(buffers[p[0]].size, buffers[p[1]].size))
    best = make_blocks(buffers, must, chosen)
    best_height = _pack_quickly(best)
    bound = max(measure_shared_load(buffers, must, may), capacity or 0)
    nothing = make_blocks(buffers, must)
    if best_height > bound and (height := _pack_quickly(nothing)) < best_height:
        best, best_height, chosen = nothing, height, []
    until = time.monotonic() + 1.0
    for pair in may:
        if best_height <= bound or time.monotonic() > until:
            break
        other = [p for p in chosen if p != pair] if pair in chosen else [*chosen, pair]
        blocks = make_blocks(buffers, must, other)
        if (height := _pack_quickly(blocks)) < best_height:
            best, best_height, chosen = blocks, height, other
    return best


def _pack_quickly(blocks: Sequence[Block]) -> int:
    return max(s.height for _, s in _solve_arenas(blocks, None, time.monotonic() + _QUICK_S, 1, 0, search=False).values())


def _solve_arenas(
    blocks: Sequence[Block], capacity: int | None, deadline: float, num_threads: int | None, seed: int, search: bool = True
) -> dict[int, tuple[list[Block], Solution]]:
    result: dict[int, tuple[list[Block], Solution]] = {}
    arenas = sorted({b.arena for b in blocks})
    for position, arena in enumerate(arenas):
        solid = [b for b in blocks if b.arena == arena and b.size > 0 and b.stop > b.start]
        share = time.monotonic() + (deadline - time.monotonic()) / (len(arenas) - position)
        problem = _make_problem(solid)
        result[arena] = solid, solve(problem, capacity=capacity, deadline=share, search=search, num_threads=num_threads, seed=seed)
    return result


def _make_problem(blocks: Sequence[Block]) -> Problem:
    def column(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    return make_problem(
        column([b.start for b in blocks]),
        column([b.stop for b in blocks]),
        column([b.size for b in blocks]),
        column([b.alignment for b in blocks]),
        column([-1 if b.offset is None else b.offset for b in blocks]),
    )


def _make_packing(
    buffers: tuple[Buffer, ...],
    blocks: Sequence[Block],
    solutions: dict[int, tuple[list[Block], Solution]],
    must: list[tuple[int, int]],
    may: list[tuple[int, int]],
    capacity: int | None,
    began: float,
) -> Packing:
    """Offsets back to the buffers, and only as much claimed as was proven for every choice of sharing."""
    offsets = [0 if b.offset is None else b.offset for b in buffers]
    heights: dict[int, int] = {}
    bounds: dict[int, int] = {}
    for arena, (solid, solution) in solutions.items():
        for block, at in zip(solid, solution.offsets.tolist(), strict=True):
            for k in block.members:
                offsets[k] = at
        heights[arena] = solution.height
        is_proof = not may and all(b.is_box for b in solid)
        inside = [b for b in buffers if b.arena == arena]
        fixed_top = max((b.offset + b.size for b in inside if b.offset is not None and not b.is_empty), default=0)
        bounds[arena] = solution.bound if is_proof else max(fixed_top, _bound_shared(buffers, must, may, arena))
    for block in blocks:  # members without bytes or life follow the block they must share with
        anchor = next((k for k in block.members if not buffers[k].is_empty), block.members[0])
        for k in block.members:
            offsets[k] = offsets[anchor] if block.size else (block.offset or 0)
    height = max((o + b.size for o, b in zip(offsets, buffers, strict=True)), default=0)
    for arena in heights:
        heights[arena] = max((o + b.size for o, b in zip(offsets, buffers, strict=True) if b.arena == arena), default=0)
    bound = max(bounds.values(), default=0)
    all_at_bound = all(heights[a] == bounds[a] for a in heights)
    status, reason = _decide_status(height, bound, all_at_bound, capacity)
    return Packing(
        status=status,
        buffers=buffers,
        offsets=tuple(offsets),
        height=height,
        lower_bound=bound,
        arena_heights=heights,
        capacity=capacity,
        method=max((s for _, s in solutions.values()), key=lambda s: s.height).method if solutions else "empty",
        nodes=sum(s.nodes for _, s in solutions.values()),
        seconds=time.monotonic() - began,
        reason=reason,
    )


def _bound_shared(buffers: Sequence[Buffer], must: list[tuple[int, int]], may: list[tuple[int, int]], arena: int) -> int:
    here = [k for k, b in enumerate(buffers) if b.arena == arena]
    name = {k: i for i, k in enumerate(here)}
    return measure_shared_load(
        [buffers[k] for k in here],
        [(name[a], name[b]) for a, b in must if a in name],
        [(name[a], name[b]) for a, b in may if a in name],
    )


def _decide_status(height: int, bound: int, all_at_bound: bool, capacity: int | None) -> tuple[Status, str]:
    if capacity is not None and bound > capacity:
        return Status.INFEASIBLE, f"no packing is lower than {bound} bytes, {bound - capacity} above the capacity of {capacity}."
    if capacity is not None and height > capacity:
        return Status.UNKNOWN, (
            f"time ran out: the lowest packing found takes {height} bytes, the capacity is {capacity}, "
            f"and none below {bound} exists; allow more time."
        )
    if all_at_bound:
        return Status.OPTIMAL, f"{height} bytes, and no packing is lower."
    return Status.FEASIBLE, f"{height} bytes; no packing is lower than {bound}."
