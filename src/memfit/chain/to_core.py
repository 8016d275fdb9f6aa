"""A chain in the core's words: its graph, costs and budget, and its moves spelt out as steps for the judge or an engine.

    move          steps (levels)                    steps (one memory)
    Advance(2,4)  Compute F_2, F_3 in place         the same, F_2 out of place while x_2 is kept
    Write(2, k)   Offload(x_2, k + 1)               keep x_2 where it is
    Read(2, k)    Reload(x_2, k + 1)                it is there
    Back(4)       Compute B_4; Free(x_4)            the same

The device is the working buffer (one state, one adjoint); storage level k is the core's level k + 1, so the core's
serial time is the papers' cost. In *one memory* (a single free level) the slots are on the device too, as in the
textbook pictures: its peak counts every x and y held at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.problem import Chain
from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.schedule import Compute, Free, Offload, Reload, Step

IN_PLACE = 1  # the variant of an op that overwrites its input


def chain_graph(chain: Chain) -> Graph:
    """F_i reads x_i and writes x_{i+1}; B_i reads x_i and y_{i+1} and writes y_i; B_l starts from x_l alone."""
    num = chain.num_steps
    adjoint = num + 1
    states = [Storage(id=i, size_bytes=chain.state_bytes, name=f"x{i}", kind=Kind.ACTIVATION) for i in range(num + 1)]
    adjoints = [Storage(id=adjoint + i, size_bytes=chain.adjoint_bytes, name=f"y{i}", kind=Kind.GRADIENT) for i in range(num + 1)]
    storages = (*states, *adjoints)
    ops = [
        Op(
            id=i,
            name=f"F{i}",
            inputs=(i,),
            outputs=(i + 1,),
            variants=(Variant(name="in place", inputs=(i,), outputs=(i + 1,), inplace_of=((i + 1, i),)),),
        )
        for i in range(num)
    ]
    same = chain.state_bytes == chain.adjoint_bytes
    for i in range(num, -1, -1):
        inputs = (i,) if i == num else (i, adjoint + i + 1)
        overwritten = i if i == num else adjoint + i + 1
        variants: tuple[Variant, ...] = ()
        if i < num or same:
            variants = (Variant(name="in place", inputs=inputs, outputs=(adjoint + i,), inplace_of=((adjoint + i, overwritten),)),)
        ops.append(Op(id=len(ops), name=f"B{i}", inputs=inputs, outputs=(adjoint + i,), variants=variants))
    tensors = tuple(Tensor(id=s.id, storage=s.id, name=s.name) for s in storages)
    return Graph(ops=tuple(ops), tensors=tensors, storages=storages, sources=(0,), results=(adjoint,))


def chain_costs(chain: Chain, graph: Graph, *, ns_per_unit: float = 1e9) -> Costs:
    """With costs in seconds, a nanosecond clock."""
    forward, backward = round(chain.forward_cost * ns_per_unit), round(chain.backward_cost * ns_per_unit)
    times = (forward,) * chain.num_steps + (backward,) * (chain.num_steps + 1)
    return Costs(
        op_time_ns=times,
        workspace_bytes=(0,) * len(times),
        variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(times, graph.ops, strict=True)),
        variant_workspace_bytes=tuple((0,) * len(op.variants) for op in graph.ops),
        levels=tuple(
            Level(write_latency_ns=round(x.write_cost * ns_per_unit), read_latency_ns=round(x.read_cost * ns_per_unit))
            for x in chain.levels
        ),
        graph_digest=graph.digest,
    )


def chain_budget(chain: Chain) -> Budget:
    limits = [None if x.slots is None else x.slots * chain.state_bytes for x in chain.levels]
    host, disk, *deeper = (*limits, None, None)
    return Budget(
        device_bytes=chain.state_bytes + chain.adjoint_bytes,
        host_bytes=host,
        disk_bytes=disk,
        deeper_bytes=tuple(deeper[: max(len(limits) - 2, 0)]),
    )


def level_steps(moves: Iterable[Move], num_steps: int) -> Iterator[Step]:
    """The core's steps for the working buffer and its storage levels, one at a time."""
    for move in moves:
        if isinstance(move, Advance):
            for i in range(move.start, move.stop):
                yield Compute(i, IN_PLACE)
        elif isinstance(move, Back):
            yield Compute(2 * num_steps - move.step, IN_PLACE if move.step < num_steps else 0)
            yield Free(move.step)
        elif isinstance(move, Write):
            yield Offload(move.step, move.level + 1)
        elif isinstance(move, Read):
            yield Reload(move.step, move.level + 1)
        else:
            yield Free(move.step, move.level + 1)


def one_memory_steps(moves: Iterable[Move], num_steps: int, *, adjoint_in_place: bool = True) -> Iterator[Step]:
    """The same schedule with its slots on the device: for a single level whose writes and reads are free."""
    kept: set[int] = set()
    for move in moves:
        if isinstance(move, Advance):
            for i in range(move.start, move.stop):
                yield Compute(i, 0 if i in kept else IN_PLACE)
        elif isinstance(move, Back):
            last = move.step == num_steps
            over_state = last and adjoint_in_place and move.step not in kept
            yield Compute(2 * num_steps - move.step, IN_PLACE if over_state or not last else 0)
            if move.step not in kept and not over_state:
                yield Free(move.step)
        elif isinstance(move, Write):
            kept.add(move.step)
        elif isinstance(move, Drop):
            kept.discard(move.step)
