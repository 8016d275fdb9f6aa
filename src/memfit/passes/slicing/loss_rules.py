"""Rules for the ops of losses: what each does to slices of the rows of its scores (`rules.py` says what a rule is).

log p split, target split ─> nll_loss ─> loss summed, weight of the targets summed        a mean is no sum: it has no rule
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.captured import OpCall
from memfit.passes.slicing.states import SUMMED, UNIFORM, WHOLE, Answer, Asked, Split, State

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # reductions, as PyTorch numbers them
_CONSTANTS: dict[Any, int | float] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.new_empty_strided.default: 0.0,  # whatever is there: any number will do
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}
"""Ops that write one number everywhere: the number, or (an int) where it stands among the arguments."""


def find_constant(call: OpCall) -> float | None:
    """The number that an op writes everywhere; None of any other op."""
    found = _CONSTANTS.get(call.target)
    number = call.args[found] if isinstance(found, int) else found
    return number if isinstance(number, (int, float)) else None


def nll_loss(asked: Asked) -> Answer | None:
    """(log p, target, weight, reduction, index to ignore) -> loss, weight of the targets. Classes are dimension 1."""
    state, reduction = asked.split(), asked.args[3]
    if state is None or not _is_of_rows(asked, state, 1) or reduction == MEAN:
        return None
    loss = SUMMED if reduction == SUM else _without_classes(state)
    return asked.answer(loss, SUMMED, takes=_whole_weight(asked, 2))


def nll_loss_backward(asked: Asked) -> Answer | None:
    """(gradient, log p, target, weight, reduction, index to ignore, weight of the targets) -> gradient of log p."""
    state, reduction = asked.split(1), asked.args[4]
    if state is None or not _is_of_rows(asked, state, 2) or not asked.are_whole(6):
        return None
    wanted = _without_classes(state) if reduction == NONE else WHOLE
    if asked.state(0) != wanted:
        return None
    return asked.answer(state, takes=_whole_weight(asked, 3))


def _is_of_rows(asked: Asked, state: Split, target: int) -> bool:
    """Whether the samples lie along another dimension than the classes, and the targets' in the same way."""
    scores = asked.args[target - 1].tensor
    weight = asked.state(target + 1)
    return (
        asked.samples[scores].dim() > 1
        and state.dim != 1
        and asked.state(target) == _without_classes(state)
        and weight in (None, WHOLE, UNIFORM)
    )


def _without_classes(state: Split) -> Split:
    return Split(state.dim - (state.dim > 1), state.rows)


def _whole_weight(asked: Asked, position: int) -> dict[int, State]:
    return {asked.args[position].tensor: WHOLE} if asked.state(position) is UNIFORM else {}


def slice_backward(asked: Asked) -> Answer | None:
    """(gradient, sizes, dimension, ...): zeros around it, in another dimension than the samples'."""
    state = asked.split()
    if state is None or asked.args[2] % asked.sample(0).dim() == state.dim:
        return None
    return asked.answer(state, args=(asked.args[0], asked.sized(state), *asked.args[2:]))


def select_backward(asked: Asked) -> Answer | None:
    """(gradient, sizes, dimension, index): the same with a dimension that is new."""
    state = asked.split()
    if state is None:
        return None
    dim = asked.args[2] % asked.made().dim()
    made = Split(state.dim + (dim <= state.dim), state.rows)
    return asked.answer(made, args=(asked.args[0], asked.sized(made), *asked.args[2:]))


def norm_of_vectors(asked: Asked) -> Answer | None:
    """linalg_vector_norm(x, order, dimensions, keepdim)."""
    state = asked.split()
    dims = asked.args[2] if len(asked.args) > 2 else None
    if state is None or not dims:
        return None
    every = {d % asked.sample(0).dim() for d in dims}
    if state.dim in every:
        return None
    keeps = len(asked.args) > 3 and asked.args[3] is True
    return asked.answer(Split(state.dim - (0 if keeps else sum(d < state.dim for d in every)), state.rows))
