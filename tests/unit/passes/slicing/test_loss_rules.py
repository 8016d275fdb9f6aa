"""The rules for ops of losses against the ops themselves, as in `test_rules`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.passes.slicing.test_rules import BATCH, S0, S1, Given, answered, check, refuse

from memfit.passes.slicing.states import SUMMED, UNIFORM, WHOLE, Split, State

aten = torch.ops.aten
CLASSES = 5
NONE, MEAN, SUM = 0, 1, 2


def x(*shape: int, state: State = S0) -> Given:
    return Given(state, *shape)


def labels(*shape: int, state: State = S0) -> Given:
    found = torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(0))
    found.view(-1)[1] = -100
    return Given(state, value=found)


def weight(state: State = WHOLE) -> Given:
    return Given(state, value=torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64))


@pytest.mark.parametrize("with_weight", [False, True])
def test_a_loss_of_rows_is_a_sum_or_a_loss_for_each_row(with_weight: bool) -> None:
    given = (weight() if with_weight else None,)
    check(aten.nll_loss_forward.default, x(BATCH, CLASSES), labels(BATCH), *given, SUM, -100, makes=(SUMMED, SUMMED))
    check(aten.nll_loss_forward.default, x(BATCH, CLASSES), labels(BATCH), *given, NONE, -100, makes=(S0, SUMMED))
    refuse(aten.nll_loss_forward.default, x(BATCH, CLASSES), labels(BATCH), *given, MEAN, -100)  # divided by what is known at the end


def test_a_loss_in_a_plane_is_cut_along_the_batch_or_a_side() -> None:
    side = Split(3, 1)
    check(aten.nll_loss2d_forward.default, x(BATCH, CLASSES, 1, 4), labels(BATCH, 1, 4), None, SUM, -100, makes=(SUMMED, SUMMED))
    in_plane = (x(2, CLASSES, 1, BATCH, state=side), labels(2, 1, BATCH, state=Split(2, 1)), None)
    check(aten.nll_loss2d_forward.default, *in_plane, SUM, -100, makes=(SUMMED, SUMMED))
    check(aten.nll_loss2d_forward.default, *in_plane, NONE, -100, makes=(Split(2, 1), SUMMED))
    refuse(aten.nll_loss2d_forward.default, *in_plane, MEAN, -100)


@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_the_gradient_of_a_sum_and_of_a_mean_needs_the_whole_count(reduction: int) -> None:
    count = Given(WHOLE, value=torch.tensor(4.0, dtype=torch.float64))
    tangent = Given(WHOLE, value=torch.tensor(0.7, dtype=torch.float64))
    rows = (x(BATCH, CLASSES), labels(BATCH), weight())
    check(aten.nll_loss_backward.default, tangent, *rows, reduction, -100, count, makes=(S0,))
    not_yet = Given(SUMMED, value=count.value)
    refuse(aten.nll_loss_backward.default, tangent, *rows, reduction, -100, not_yet)


def test_the_gradient_of_a_loss_for_each_row() -> None:
    count = Given(WHOLE, value=torch.zeros((), dtype=torch.float64))
    rows = (x(BATCH, CLASSES), labels(BATCH), None)
    check(aten.nll_loss_backward.default, x(BATCH), *rows, NONE, -100, count, makes=(S0,))
    refuse(aten.nll_loss_backward.default, x(BATCH, state=WHOLE), *rows, NONE, -100, count)
    plane = (x(BATCH, CLASSES, 1, 4), labels(BATCH, 1, 4), None)
    check(aten.nll_loss2d_backward.default, x(BATCH, 1, 4), *plane, NONE, -100, count, makes=(S0,))


def test_classes_are_not_rows() -> None:
    refuse(aten.nll_loss_forward.default, x(4, BATCH, state=S1), labels(4, state=WHOLE), None, SUM, -100)
    refuse(aten.nll_loss_forward.default, x(BATCH, CLASSES), labels(BATCH, state=WHOLE), None, SUM, -100)
    cut = Given(S0, value=torch.ones(BATCH, dtype=torch.float64))
    refuse(aten.nll_loss_forward.default, x(BATCH, BATCH), labels(BATCH), cut, SUM, -100)  # a weight for each class, and it is cut


def test_a_weight_of_ones_is_made_whole() -> None:
    ones = Given(UNIFORM, value=torch.ones(CLASSES, dtype=torch.float64))
    check(aten.nll_loss_forward.default, x(BATCH, CLASSES), labels(BATCH), ones, SUM, -100, makes=(SUMMED, SUMMED))


def test_gradients_of_parts() -> None:
    check(aten.slice_backward.default, x(BATCH, 3, 4), [BATCH, 5, 4], 1, 0, -2, 1, makes=(S0,))
    refuse(aten.slice_backward.default, x(BATCH, 3), [2 * BATCH, 3], 0, 0, BATCH, 1)
    check(aten.select_backward.default, x(BATCH), [BATCH, 3], 1, 2, makes=(S0,))
    check(aten.select_backward.default, x(BATCH), [3, BATCH], 0, 2, makes=(S1,))


def test_a_copy_onto_something() -> None:
    check(aten.copy.default, x(BATCH, 3), x(BATCH, 3), makes=(S0,))
    refuse(aten.copy.default, x(BATCH, 3), x(BATCH, 3, state=WHOLE))


def test_reductions_over_classes() -> None:
    for target in (aten.logsumexp.default, aten.argmax.default, aten.any.dim):
        dims: Any = [-1] if target is aten.logsumexp.default else -1
        check(target, x(BATCH, 3), dims, makes=(S0,))
        check(target, x(3, BATCH, state=S1), 0 if isinstance(dims, int) else [0], makes=(S0,))
        refuse(target, x(BATCH, 3), 0 if isinstance(dims, int) else [0])
    refuse(aten.argmax.default, x(BATCH, 3))  # of all
    check(aten.max.dim, x(BATCH, 3), 1, True, makes=(S0, S0))
    check(aten.topk.default, x(BATCH, 4), 2, makes=(S0, S0))
    refuse(aten.topk.default, x(BATCH, 4), 2, 0)
    check(aten.linalg_vector_norm.default, x(BATCH, 4), 2.0, [1], True, makes=(S0,))
    refuse(aten.linalg_vector_norm.default, x(BATCH, 4), 2.0, [0])
    refuse(aten.linalg_vector_norm.default, x(BATCH, 4))


@pytest.mark.parametrize("target", [aten.zeros_like.default, aten.ones_like.default])
def test_constants_like_something_are_uniform(target: Any) -> None:
    check_uniform(target, x(BATCH, 3))
    check_uniform(aten.new_zeros.default, x(BATCH, 3), [BATCH, 7])
    check_uniform(aten.full_like.default, x(BATCH, 3), 2)


def check_uniform(target: Any, *args: Any) -> None:
    answer, _, _ = answered(target, args, {})
    assert answer is not None
    assert answer.makes == (UNIFORM,)
