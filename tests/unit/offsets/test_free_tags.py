"""Free tags and liveness counters, on the lecture's exp(a * b + 3) and on random programs."""

from __future__ import annotations

from random import Random

import pytest
from tests.strategies import PLAIN, random_graph

from memfit.core.errors import BadInput
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor
from memfit.offsets import Colouring, colour_graph


def program(num_ops: int, reads: list[tuple[int, ...]], sizes: list[int]) -> Graph:
    """Tensors 0 and 1 are inputs a and b; op k makes tensor 2 + k. The last is the result."""
    return Graph(
        ops=tuple(Op(id=k, name=f"op{k}", inputs=reads[k], outputs=(2 + k,)) for k in range(num_ops)),
        tensors=tuple(Tensor(id=k, storage=k) for k in range(2 + num_ops)),
        storages=tuple(Storage(id=k, size_bytes=sizes[k], kind=Kind.INPUT if k < 2 else Kind.ACTIVATION) for k in range(2 + num_ops)),
        sources=(0, 1),
        results=(0, 1, 1 + num_ops),
    )


EXP = program(3, [(0, 1), (2,), (3,)], [4] * 5)


def test_without_sharing_temporaries_are_linear_in_the_ops() -> None:
    assert colour_graph(EXP, share=False).total_bytes == 3 * 4


def test_normal_sharing_uses_two_tags_in_turn() -> None:
    colouring = colour_graph(EXP)
    assert colouring.total_bytes == 8
    assert colouring.tag_of == (-1, -1, 0, 1, 0)


def test_in_place_needs_one_tag() -> None:
    colouring = colour_graph(EXP, may_overwrite=(1, 2))
    assert (colouring.total_bytes, colouring.num_inplace) == (4, 2)


def test_in_place_is_refused_while_another_op_still_needs_the_value() -> None:
    """Op 1 may overwrite tensor 2, but op 2 reads it later: they must not share."""
    graph = program(3, [(0, 1), (2,), (2, 3)], [4] * 5)
    colouring = colour_graph(graph, may_overwrite=(1,))
    assert colouring.num_inplace == 0
    assert colouring.tag_of[2] != colouring.tag_of[3]


def test_inputs_of_the_caller_are_never_overwritten() -> None:
    graph = program(1, [(0, 1)], [4] * 3)
    assert colour_graph(graph, may_overwrite=(0,)).num_inplace == 0


def test_a_long_chain_needs_two_buffers_in_turn() -> None:
    """SOURCES B9: inference of an N-layer net is O(1)."""
    n = 50
    graph = program(n, [(0, 1), *((k + 2,) for k in range(n - 1))], [4] * (n + 2))
    assert colour_graph(graph).total_bytes == 8


def test_small_free_tags_grow_only_when_asked() -> None:
    """The freed 4-byte tag is too small for 8 bytes."""
    graph = program(3, [(0, 1), (2,), (3,)], [4, 4, 4, 8, 8])
    assert colour_graph(graph, grow=False).total_bytes == 4 + 8 + 8
    assert colour_graph(graph).total_bytes == 8 + 8


def test_the_smallest_sufficient_tag_is_taken() -> None:
    graph = program(5, [(0, 1), (0, 1), (2, 3), (4,), (5,)], [4, 4, 100, 10, 1, 10, 1])
    colouring = colour_graph(graph)
    assert colouring.tag_of[5] == colouring.tag_of[3]


def test_repeated_ops_are_refused() -> None:
    with pytest.raises(BadInput, match="twice"):
        colour_graph(EXP, [0, 1, 1, 2])


def holders_clash(graph: Graph, colouring: Colouring) -> bool:
    """Replay: is a tag overwritten while a value in it still has a reader to come?"""
    last_use = {}
    for op in graph.ops:
        for t in op.inputs:
            last_use[graph.storage_of(t)] = op.id
    for t in graph.results:
        last_use[graph.storage_of(t)] = len(graph.ops)
    owner: dict[int, int] = {}
    for op in graph.ops:
        for t in op.outputs:
            storage = graph.storage_of(t)
            tag = colouring.tag_of[storage]
            previous = owner.get(tag)
            if previous is not None and previous != storage and last_use.get(previous, -1) > op.id:
                return True
            if graph.storages[storage].size_bytes > colouring.tag_bytes[tag]:
                return True
            owner[tag] = storage
    return False


def test_random_programs_are_coloured_legally() -> None:
    random = Random(5)
    for _ in range(300):
        graph = random_graph(random, PLAIN)
        for overwriting in ((), range(len(graph.ops))):
            colouring = colour_graph(graph, may_overwrite=overwriting)
            assert not holders_clash(graph, colouring)
            assert colouring.total_bytes <= colour_graph(graph, share=False).total_bytes
