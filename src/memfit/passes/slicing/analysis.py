"""Which values of a captured step can be had slice by slice of the batch, and which ops can run on a slice.

    x split ─> conv ─> relu ─> pool ─> ...    split
    weights   ─────────^                      whole
    d weight <─ conv' <─ ...                  summed over slices

Rules are asked op by op (`batch_rules`). Where one has no answer (statistics over the batch, random numbers, an op nobody described)
its results count as given from outside: split again where their first dimension has the batch's size, else whole. That is a choice of
where to cut what is given and needs no proof; what is proven is each op that has an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from memfit.capture.captured import Captured, Role
from memfit.core.graph import Kind
from memfit.passes.slicing.rules import ask
from memfit.passes.slicing.states import SUMMED, UNIFORM, WHOLE, Answer, Asked, Rows, Split, State
from memfit.torch_private.trees import map_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`states` of all tensors that have one, `answers` of the ops that can run on slices.

    With `outer` it is that of one sample of another batch: a slice is one of its samples, and of that so many rows.
    """

    captured: Captured
    size: int
    states: dict[int, State]
    answers: dict[int, Answer]
    outer: Batch | None = None

    def is_cut(self, tensor: int) -> bool:
        """Whether a slice has its own part of it."""
        return any(cut is not None for cut in self.cuts(tensor))

    def is_summed(self, tensor: int) -> bool:
        """Whether what slices make of it is added up."""
        return self.states.get(tensor) is SUMMED or (self.outer is not None and self.outer.is_summed(tensor))

    def cuts(self, tensor: int) -> tuple[Split | None, Split | None]:
        """How a slice's part of it is cut out: first a sample, then rows of that."""
        state, around = self.states.get(tensor), None if self.outer is None else self.outer.states.get(tensor)
        return (around if isinstance(around, Split) else None), (state if isinstance(state, Split) else None)

    @property
    def num_samples(self) -> int:
        return 1 if self.outer is None else self.outer.size


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


def analyse_rows(captured: Captured, size: int, outer: Batch | None = None) -> Batch:
    """The same for a number of rows that is somewhere in the step, or in one sample of an outer batch, for who looks at the ops of one place
    of it. What is not made by an op with an answer is cut where it can be, unless it is made of weights and constants alone. Sums of forward
    are whole in backward."""
    graph = captured.graph
    moving = {t for t in graph.sources if graph.storages[graph.storage_of(t)].kind is Kind.INPUT}

    def cut(tensor: int) -> State:
        state = WHOLE if outer is None else outer.states[tensor]
        return _cut(_part_of(captured.samples[tensor], state), size) if tensor in moving else WHOLE

    states: dict[int, State] = {t: cut(t) for t in graph.sources}
    now = states  # as an op sees them
    answers: dict[int, Answer] = {}
    boundary = captured.boundary
    for op in graph.ops:
        call = captured.calls[op.id]
        if op.id == boundary:
            now = {t: WHOLE if state is SUMMED else state for t, state in states.items()}
        if call.role is not Role.CALL or not moving.isdisjoint(op.inputs):
            moving.update(op.outputs)
        answer = _ask(captured, op.id, size, now) if outer is None else _ask_within(outer, op.id, size, now)
        made: dict[int, State] = {t: cut(t) for t in op.outputs}
        if answer is not None:
            answers[op.id] = answer
            made = {t: state for t, state in zip(call.outputs, answer.makes, strict=True) if t is not None}
        states.update(made)
        now.update(made)
    return Batch(captured=captured, size=size, states=states, answers=answers, outer=outer)


def _ask_within(outer: Batch, op: int, size: int, states: dict[int, State]) -> Answer | None:
    """About the rows of one sample: what the op is once it runs on one."""
    answer, call = outer.answers.get(op), outer.captured.calls[op]
    if answer is None:
        return None
    node, made = outer.captured.graph.ops[op], dict(zip(call.outputs, answer.makes, strict=True))
    whole = {t: made.get(t, answer.takes.get(t, outer.states[t])) for t in (*node.inputs, *node.outputs)}
    samples = {t: part for t, state in whole.items() if (part := _part_of(outer.captured.samples[t], state)) is not None}
    args = map_leaves(lambda v: v.each if isinstance(v, Rows) else v, answer.args)
    return ask(Asked(call=replace(call, args=args), batch=size, samples=samples, states=states))


def _part_of(sample: torch.Tensor | None, state: State) -> torch.Tensor | None:
    """Of one sample of the batch."""
    return sample.narrow(state.dim, 0, state.rows) if sample is not None and isinstance(state, Split) else sample


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
