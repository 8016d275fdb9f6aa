"""Every model of the zoo trains exactly at two thirds of its activation bytes. Minutes: see `benchmarks/eager.py zoo` for the figures."""

from __future__ import annotations

import pytest
import torch
from benchmarks.models.zoo import ZOO, make
from tests.training import fit_tight, same, train, twin

import memfit
from memfit.capture.inputs import Inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_two_steps(name: str) -> None:
    plain, inputs, loss_fn, targets = make(name)
    model = twin(plain)
    given = Inputs.of(inputs)
    try:
        fitted = fit_tight(model, inputs, fraction=0.66, planner="auto", loss_fn=loss_fn, example_targets=targets)
    except memfit.InfeasibleBudget as error:
        pytest.skip(str(error))
    call = memfit.Inputs(*given.args, *targets, **given.kwargs)
    ours = train(fitted, [(call,)] * 2, loss_fn=None)
    theirs = train(plain, [(inputs, *targets)] * 2, loss_fn=loss_fn)
    if name in ("lstm", "gru"):  # traced as cells, which round otherwise than the native layers
        torch.testing.assert_close(ours["gradients"], theirs["gradients"])
    else:
        assert same(ours, theirs)
