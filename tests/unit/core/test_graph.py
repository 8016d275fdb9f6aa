"""What makes a graph valid, and what is looked up in it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from random import Random

import numpy as np
import pytest
from tests import strategies as some
from tests.small import chain, graph_of, op

from memfit.core.errors import BadInput
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.op_forms import form_of


def test_an_empty_graph_is_a_graph() -> None:
    graph = Graph(ops=(), tensors=(), storages=(), sources=(), results=())
    assert len(graph.digest) == 64


def test_lookups() -> None:
    graph = graph_of([8, 4, 2], [op(0, [0], [1]), op(1, [1], [3]), op(2, [3, 0, 0], [2])], results=[2], views=[1])
    assert graph.storage_of(3) == 1
    assert graph.size_of(3) == 4
    assert graph.storage_ids == (0, 1, 2, 1)
    assert graph.tensors_of == ((0,), (1, 3), (2,))
    assert graph.producers == ((), (0,), (2,), (1,))
    assert graph.readers == ((0, 2), (1,), (), (2,))
    assert graph.is_view(graph.ops[1], 3)
    assert not graph.is_view(graph.ops[0], 1)


def test_variants_count_as_producers_but_their_reads_do_not_make_readers() -> None:
    other = Variant(name="other", inputs=(0,), outputs=(2,))
    graph = graph_of([1, 1, 1], [op(0, [0], [1]), op(1, [1], [2], variants=(other,))], results=[2])
    assert graph.producers[2] == (1,)
    assert graph.readers[0] == (0,)
    assert graph.ops[1].form(1) is other
    assert graph.ops[1].forms == (graph.ops[1], other)


def test_forms_sort_out_reads_fresh_storages_views_and_takeovers() -> None:
    inplace = op(0, [0, 1, 0], [2, 4, 3, 5], inplace_of=((3, 1),))
    graph = graph_of([8, 4, 2, 4], [inplace], sources=[0, 1], results=[2], views=[0, 2])
    form = form_of(graph, 0, 0)
    assert form.inputs == (0, 1, 0)
    assert form.fresh == ((2, (2, 5)),)
    assert form.takeovers == ((3, 1, (3,)),)
    assert form.views == (4,)
    assert form_of(graph, 0, 0) is form


def test_graphs_are_values() -> None:
    assert chain(3) == chain(3)
    assert hash(chain(3)) == hash(chain(3))
    with pytest.raises(FrozenInstanceError):
        chain(3).results = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ops": (op(1, [0], [1]),)}, "op at position 0 has id 1: ids are positions"),
        ({"tensors": (Tensor(id=0, storage=0), Tensor(id=5, storage=1))}, "tensor at position 1 has id 5"),
        ({"storages": (Storage(id=0, size_bytes=-1), Storage(id=1, size_bytes=1))}, "storage 0 has -1 bytes"),
        ({"storages": (Storage(id=0, size_bytes=2**63 - 1), Storage(id=1, size_bytes=1))}, "2\\*\\*62 bytes or more"),
        ({"tensors": (Tensor(id=0, storage=0), Tensor(id=1, storage=2))}, "tensor 1 views storage 2, but there are 2"),
        ({"tensors": (Tensor(id=0, storage=0), Tensor(id=1, storage=-1))}, "tensor 1 views storage -1"),
        ({"sources": (9,)}, "source names tensor 9, but there are 2"),
        ({"results": (-1,)}, "result names tensor -1"),
        ({"sources": ()}, "reads tensor 0 before any earlier op or source provides it: a cycle"),
        ({"ops": (op(0, [1], [1]),)}, "op 0 .* reads tensor 1 before"),
        ({"ops": (op(0, [0], [7]),)}, "op 0 .* names tensor 7"),
        ({"ops": ()}, "result tensor 1 is neither a source nor produced"),
    ],
)
def test_invalid_graphs_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        replace(chain(1), digest="", **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (op(0, [0, 1], [2], inplace_of=((3, 0),)), "is not .one of its outputs, one of its inputs"),
        (op(0, [0], [2], inplace_of=((2, 1),)), "is not .one of its outputs, one of its inputs"),
        (op(0, [0, 1], [2, 3], inplace_of=((2, 0), (3, 0))), "two in-place pairs"),
        (op(0, [0, 1], [2], inplace_of=((2, 0), (2, 1))), "two in-place pairs"),
        (op(0, [0], [4], inplace_of=((4, 0),)), "view of a storage that it overwrites"),
        (op(0, [0], [2, 4], inplace_of=((2, 0),)), "view of a storage that it overwrites"),
        (op(0, [0, 1, 6], [2], inplace_of=((2, 0),)), "is about to become"),
        (op(0, [0], [5], inplace_of=((5, 0),)), "equal size, not 3 and 8 bytes"),
        (op(0, [0], [2], inplace_of=((2, 99),)), "names tensor 99"),
    ],
)
def test_in_place_pairs_are_checked(bad: Op, complaint: str) -> None:
    # tensors 0..3 and 5 are whole storages of 8, 8, 8, 8 and 3 bytes, 4 views storage 0, 6 views storage 2
    storages = tuple(Storage(id=i, size_bytes=n) for i, n in enumerate((8, 8, 8, 8, 3)))
    tensors = tuple(Tensor(id=i, storage=s) for i, s in enumerate((0, 1, 2, 3, 0, 4, 2)))
    with pytest.raises(BadInput, match=complaint):
        Graph(ops=(bad,), tensors=tensors, storages=storages, sources=(0, 1, 6), results=())


def test_variants_are_checked_like_ops() -> None:
    with pytest.raises(BadInput, match="reads tensor 1 before"):
        graph_of([1, 1], [op(0, [0], [1], variants=(Variant(name="v", inputs=(1,), outputs=(1,)),))])


def test_the_digest_covers_what_matters_and_nothing_else() -> None:
    graph = chain(2)
    same = [
        replace(graph, digest="", storages=tuple(replace(s, name="x") for s in graph.storages)),
        replace(graph, digest="", tensors=tuple(replace(t, name="x") for t in graph.tensors)),
        replace(graph, digest="", ops=tuple(replace(o, where="x") for o in graph.ops)),
    ]
    other = [
        replace(graph, digest="", storages=(replace(graph.storages[0], size_bytes=11), *graph.storages[1:])),
        replace(graph, digest="", storages=(replace(graph.storages[0], kind=Kind.BUFFER), *graph.storages[1:])),
        replace(graph, digest="", ops=(replace(graph.ops[0], replayable=False), graph.ops[1])),
        replace(graph, digest="", ops=(replace(graph.ops[0], seeded=True), graph.ops[1])),
        replace(graph, digest="", results=(1, 2)),
        replace(graph, digest="", sources=(0, 1)),
    ]
    assert {g.digest for g in same} == {graph.digest}
    assert len({g.digest for g in (graph, *other)}) == len(other) + 1
    with pytest.raises(BadInput, match="does not match its content"):
        replace(graph, digest="0" * 64)


def test_numpy_integers_give_the_same_digest() -> None:
    graph = chain(1)
    storages = tuple(replace(s, size_bytes=np.int64(s.size_bytes)) for s in graph.storages)  # type: ignore[arg-type]
    assert replace(graph, digest="", storages=storages).digest == graph.digest


def test_random_graphs_rarely_share_a_digest() -> None:
    assert len({some.random_graph(Random(seed)).digest for seed in range(200)}) > 195
