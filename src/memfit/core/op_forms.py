"""What running one form of an op does to storages: which it reads, allocates, overwrites or only views.

    inputs t1(A) t2(B)  ->  outputs t3(C) t4(A) t5(D over B)
    reads A, B;  fresh C;  view t4 of A;  D takes over the bytes of B

Every judge, walk and engine needs this sorted out once per form, not at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.core.graph import Graph, Op, Variant


class Form(NamedTuple):
    """A form with its storages looked up. Storages come with the tensors that the form makes in them."""

    inputs: tuple[int, ...]
    fresh: tuple[tuple[int, tuple[int, ...]], ...]  # (storage, tensors) that the form allocates
    takeovers: tuple[tuple[int, int, tuple[int, ...]], ...]  # (new storage, old storage, tensors of new) overwritten in place
    views: tuple[int, ...]  # output tensors that lie in an input's storage


def form_of(graph: Graph, op: int, variant: int) -> Form:
    """The form of an op with its storages. The graph remembers it, because planners judge thousands of schedules of one graph."""
    known: dict[int, Form] = graph.known_forms[variant]
    found = known.get(op)
    if found is None:
        found = known[op] = resolve(graph.ops[op].form(variant), graph.storage_ids)
    return found


def resolve(form: Op | Variant, storage_of: Sequence[int]) -> Form:
    """`storage_of[t]` is the storage of tensor t. The graph has checked that in-place outputs are not views."""
    read = [storage_of[t] for t in form.inputs]
    if len(form.outputs) == 1 and not form.inplace_of:  # most ops
        storage = storage_of[form.outputs[0]]
        return Form(form.inputs, (), (), form.outputs) if storage in read else Form(form.inputs, ((storage, form.outputs),), (), ())
    made: dict[int, tuple[int, ...]] = {}
    views = []
    for tensor in form.outputs:
        storage = storage_of[tensor]
        if storage in read:
            views.append(tensor)
        else:
            made[storage] = (*made.get(storage, ()), tensor)
    takeovers = [(storage_of[new], storage_of[old], made.pop(storage_of[new])) for new, old in form.inplace_of]
    return Form(form.inputs, tuple(made.items()), tuple(takeovers), tuple(views))
