"""Which values of a captured step can be had slice by slice of the batch, and which ops can run on a slice.

    x split ─> conv ─> relu ─> pool ─> ...    split
    weights   ─────────^                      whole
    d weight <─ conv' <─ ...                  summed over slices

Rules are asked op by op (`batch_rules`). Where one has no answer (statistics over the batch, random numbers, an op nobody described)
its results count as given from outside: split again where their first dimension has the batch's size, else whole. That is a choice of
where to cut what is given and needs no proof; what is proven is each op that has an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit.capture.captured import Captured, Role
from memfit.core.graph import Kind
from memfit.passes.slicing.rules import ask
from memfit.passes.slicing.states import SUMMED, UNIFORM, WHOLE, Answer, Asked, Split, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`states` of all tensors that have one, `answers` of the ops that can run on slices."""

    captured: Captured
    size: int
    states: dict[int, State]
    answers: dict[int, Answer]

    def is_cut(self, tensor: int) -> bool:
        """Whether a slice has its own part of it."""
        return isinstance(self.states.get(tensor), Split)


def analyse(captured: Captured) -> Batch | None:
    """None where no input has a batch of at least two samples."""
    graph, samples = captured.graph, captured.samples
    inputs = [t for t in graph.sources if graph.storages[graph.storage_of(t)].kind is Kind.INPUT]
    largest = max((s for t in inputs if (s := samples[t]) is not None and s.dim() > 0), key=lambda s: s.nbytes, default=None)
    if largest is None or largest.shape[0] < 2:
        return None
    size = largest.shape[0]
    states: dict[int, State] = {t: _given(samples[t], size) if t in inputs else WHOLE for t in graph.sources}
    answers: dict[int, Answer] = {}
    for op in graph.ops:
        answer = _ask(captured, op.id, size, states)
        made = captured.calls[op.id].outputs
        if answer is not None:
            answers[op.id] = answer
            states.update((t, state) for t, state in zip(made, answer.makes, strict=True) if t is not None)
        else:
            constant = captured.calls[op.id].role is Role.CALL and all(states[t] in (WHOLE, UNIFORM) for t in op.inputs)
            states.update((t, WHOLE if constant else _given(samples[t], size)) for t in op.outputs)
    return Batch(captured=captured, size=size, states=states, answers=answers)


def analyse_rows(captured: Captured, size: int) -> Batch:
    """The same for a number of rows that is somewhere in the step, for who looks at the ops of one place of it. What is not made by an op
    with an answer is cut where it can be, unless it is made of weights and constants alone. Sums of forward are whole in backward."""
    graph, samples = captured.graph, captured.samples
    moving = {t for t in graph.sources if graph.storages[graph.storage_of(t)].kind is Kind.INPUT}
    states: dict[int, State] = {t: _cut(samples[t], size) if t in moving else WHOLE for t in graph.sources}
    now = states  # as an op sees them
    answers: dict[int, Answer] = {}
    for op in graph.ops:
        call = captured.calls[op.id]
        if op.id == captured.boundary:
            now = {t: WHOLE if state is SUMMED else state for t, state in states.items()}
        if call.role is not Role.CALL or not moving.isdisjoint(op.inputs):
            moving.update(op.outputs)
        answer = _ask(captured, op.id, size, now)
        made: dict[int, State] = {t: _cut(samples[t], size) if t in moving else WHOLE for t in op.outputs}
        if answer is not None:
            answers[op.id] = answer
            made = {t: state for t, state in zip(call.outputs, answer.makes, strict=True) if t is not None}
        states.update(made)
        now.update(made)
    return Batch(captured=captured, size=size, states=states, answers=answers)


def _cut(sample: torch.Tensor | None, size: int) -> State:
    """Along the first dimension that has more than one place, if those can be so many equal pieces."""
    shape = () if sample is None else tuple(sample.shape)
    dim = next((d for d, n in enumerate(shape) if n != 1), None)
    return WHOLE if dim is None or shape[dim] % size or not shape[dim] else Split(dim, shape[dim] // size)


def _ask(captured: Captured, op: int, size: int, states: dict[int, State]) -> Answer | None:
    call, node = captured.calls[op], captured.graph.ops[op]
    samples = {t: s for t in (*node.inputs, *node.outputs) if (s := captured.samples[t]) is not None}
    plain = call.role is Role.CALL and not node.seeded and not node.inplace_of and len(samples) == len({*node.inputs, *node.outputs})
    return ask(Asked(call=call, batch=size, samples=samples, states=states)) if plain else None


def _given(sample: torch.Tensor | None, size: int) -> State:
    """Of what comes from outside."""
    return Split(0, 1) if sample is not None and sample.dim() > 0 and sample.shape[0] == size else WHOLE
