"""From budgets in bytes to storage levels in states: how many fit, what a copy costs, and an error with the least budget where none fits."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.chain.run.state_files import FILE_OVERHEAD_BYTES, StateFolder
from memfit.chain.run.state_store import DISK, HOST, MEMORY
from memfit.chain.run.states import copy_to_host, copy_tree, flatten, is_cuda, move_like, synchronize, tree_bytes
from memfit.core.errors import BadInput, InfeasibleBudget
from memfit.core.units import exact_bytes, format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCosts:
    """Seconds of one forward step, and of a copy to and from each level. Backward steps run once each whatever the plan."""

    forward_s: float
    host_write_s: float = 0.0
    host_read_s: float = 0.0
    disk_write_s: float = 0.0
    disk_read_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """`places[k]` with `slots[k]` states each (None: no limit), and the bytes the working buffers take."""

    places: tuple[str, ...]
    slots: tuple[int | None, ...]
    working_bytes: int
    state_bytes: int
    adjoint_bytes: int


def make_room(
    state0: Any, adjoint: int | str, num_steps: int, budget: int | str, host: int | str | None, disk: int | str | None, *, use_disk: bool
) -> Room:
    """How many states fit where.

    A step needs its input and its output, a backward step both adjoints; with a disk one state is being written and one read
    ahead. States that are not on a CUDA device are in host memory already, so `host` then adds to the budget.
    """
    leaves, _ = flatten(state0)
    state_bytes = tree_bytes(state0)
    adjoint_bytes = parse_bytes(adjoint, what="adjoint size")
    on_device = is_cuda(leaves)
    memory = parse_bytes(budget, what="budget")
    host_bytes = 0 if host is None else parse_bytes(host, what="host budget")
    if not on_device:
        memory, host_bytes = memory + host_bytes, 0
    in_flight = 2 * state_bytes if use_disk else 0
    working = 2 * state_bytes + 2 * adjoint_bytes
    elsewhere = use_disk or host_bytes >= state_bytes > 0
    minimum = working + in_flight + (0 if elsewhere or num_steps == 0 else state_bytes)
    if memory < minimum:
        raise InfeasibleBudget(
            f"budget {format_bytes(memory)} is below the minimum {format_bytes(minimum)}: two states and two adjoints are held while a "
            f"step runs ({format_bytes(working)})"
            + (f", one state is written and one read ahead ({format_bytes(in_flight)})" if use_disk else "")
            + (f", and x_0 must be kept ({format_bytes(state_bytes)})" if not elsewhere and num_steps else "")
            + f'. Try budget="{exact_bytes(minimum)}"'
            + ("." if use_disk else ", or a disk."),
            minimum_bytes=minimum,
        )
    places, slots = [MEMORY], [_slots(memory - working - in_flight, state_bytes)]
    if host_bytes:
        places.append(HOST)
        slots.append(_slots(host_bytes, state_bytes))
    if use_disk:
        places.append(DISK)
        limit = None if disk is None else parse_bytes(disk, what="disk budget") - 2 * (adjoint_bytes + FILE_OVERHEAD_BYTES)
        slots.append(None if limit is None else max(limit, 0) // (state_bytes + FILE_OVERHEAD_BYTES))
    if num_steps and not any(s is None or s for s in slots):
        minimum_disk = state_bytes + FILE_OVERHEAD_BYTES + 2 * (adjoint_bytes + FILE_OVERHEAD_BYTES)
        raise InfeasibleBudget(
            f"no level has room for one state of {format_bytes(state_bytes)}: x_0 must be kept somewhere while the chain advances. "
            f'Try budget="{exact_bytes(minimum + state_bytes)}" or disk="{exact_bytes(minimum_disk)}".',
            minimum_bytes=minimum + state_bytes,
        )
    return Room(places=tuple(places), slots=tuple(slots), working_bytes=working, state_bytes=state_bytes, adjoint_bytes=adjoint_bytes)


def _slots(capacity_bytes: int, state_bytes: int) -> int | None:
    return capacity_bytes // state_bytes if state_bytes else None


def measure(
    step_fn: Callable[[Any, int], Any], state0: Any, room: Room, folder: StateFolder | None, num_steps: int
) -> tuple[ChainCosts, Any]:
    """The costs of this machine and these functions, and x_1, which the measured forward step has made anyway."""
    first = None
    forward = host_write = host_read = disk_write = disk_read = 0.0
    if num_steps:
        start = copy_tree(state0)
        synchronize(state0)
        begin = time.perf_counter()
        first = step_fn(start, 0)
        synchronize(state0)
        forward = time.perf_counter() - begin
    if HOST in room.places:
        host_write, copied = _measure_seconds(lambda: copy_to_host(state0))
        host_read, _ = _measure_seconds(lambda: synchronize(move_like(copied, state0)))
    if folder is not None and num_steps:
        disk_write, _ = _measure_seconds(lambda: folder.write("state", 0, state0))
        disk_read, _ = _measure_seconds(lambda: folder.read("state", 0, state0))
        folder.drop("state", 0)
    costs = ChainCosts(forward_s=forward, host_write_s=host_write, host_read_s=host_read, disk_write_s=disk_write, disk_read_s=disk_read)
    return costs, first


def _measure_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def add_step_argument(function: Callable[..., Any], num_states: int) -> Callable[..., Any]:
    """`function`, to be called with the step's number after its states; the number is left out where it takes none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return function
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if places > num_states:
        return function
    if places < num_states:
        raise BadInput(f"a function with {places} parameters was given where {num_states} states (and the step's number) are passed.")
    return lambda *arguments: function(*arguments[:num_states])


def open_folder(folder: str | Path | None, disk: int | str | None) -> tuple[StateFolder | None, bool]:
    """The folder for checkpoints, and whether it is a temporary one that nobody can resume from."""
    if folder is None and disk is None:
        return None, False
    if folder is not None:
        return StateFolder(Path(folder)), False
    import tempfile

    return StateFolder(Path(tempfile.mkdtemp(prefix="memfit-chain-"))), True
