"""Sizes left open in a trace: what is marked, what is taken for granted, and what becomes a number."""

from __future__ import annotations

import pytest
import torch

from memfit.core.errors import Unsupported
from memfit.torch_private.symbolic import Numbers, Sizes, formula_of, is_formula, is_symbolic, marked_as_varying


def test_marks_are_gone_afterwards_also_after_an_error() -> None:
    tensors = (torch.ones(3, 4), torch.ones(3))

    def fail() -> None:
        with marked_as_varying(tensors, {0: frozenset({1})}):
            assert vars(tensors[0])
            assert not vars(tensors[1])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not vars(tensors[0])


def test_a_mark_of_the_callers_stays() -> None:
    tensor = torch.ones(3, 4)
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    before = dict(vars(tensor))
    with marked_as_varying((tensor,), {0: frozenset({1})}):
        pass
    assert vars(tensor) == before


def test_open_sizes_become_the_numbers_of_a_call() -> None:
    sizes = Sizes()
    fake = sizes.like(torch.ones(5, 7, 2), 0, frozenset({0, 1}))
    with sizes.mode:
        rows = fake[:, 1:].reshape(-1, 2).shape[0]
        assert is_symbolic(rows)
        assert not is_symbolic(fake.shape[2])
    sizes.close()
    numbers = sizes.at((torch.ones(3, 11, 2),))
    assert numbers is not None
    assert numbers.of(formula_of(rows)) == 3 * 10
    assert numbers.of_all([formula_of(n) for n in fake.stride()]) == (22, 2, 1)
    assert is_formula(formula_of(rows))
    assert not is_formula(formula_of(4))


def test_what_was_taken_for_granted_has_to_hold() -> None:
    sizes = Sizes()
    fake = sizes.like(torch.ones(5, 7), 0, frozenset({1}))
    assert fake.shape[1] > 5
    sizes.close()
    assert sizes.at((torch.ones(5, 6),)) is not None
    assert sizes.at((torch.ones(5, 5),)) is None
    assert sizes.at((torch.ones(5, 1),)) is None  # a size of one is a case of its own


def test_a_size_that_is_no_size_of_the_call_is_refused() -> None:
    fake = Sizes().like(torch.ones(7), 0, frozenset({0}))
    with pytest.raises(Unsupported, match="depends on values"):
        Numbers({}).of(formula_of(fake.shape[0]))
