"""Gradients of the models that `compiled.py measure` measures, dropout switched off: how far from fp64, beside torch.compile's and eager's.

With dropout everybody draws other numbers and nothing can be compared, and it hides wrong gradients. A model without it is another
graph, so this is a part of its own ("gradients"), on an eighth of the batch, at budgets of what is kept when nothing is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.lib.gpu import gradients
from benchmarks.lib.measuring import Rows, distances, exact_gradients, gpu, loss_of, step_of
from benchmarks.models.peers import Peer
from benchmarks.parts.compiled.memfit_rows import fit

SCALE = 1 / 8
_SHARES = (0.7, 0.4)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def compared(peer: Peer, model: nn.Module, device: str, plan_seconds: float) -> Rows:
    """A row for each way to run the step."""
    from memfit.core.errors import InfeasibleBudget

    model = without_dropout(model)
    inputs, targets = peer.data(device, SCALE)
    exact = exact_gradients(peer, model, inputs, targets, device)
    if exact is None:
        return

    def row(what: str, forward: Any, **more: Any) -> dict[str, Any]:
        step = step_of(peer, device, forward)
        step()
        with gpu():
            found = gradients(step, model)
        return {"what": f"gradients, {what}", "from_fp64": distances(exact, found), **more}

    eager = loss_of(peer, model)
    compiled = torch.compile(eager, dynamic=False)
    yield row("eager", lambda: eager(inputs, targets))
    yield row("compile", lambda: compiled(inputs, targets))
    options = {"time_limit_s": plan_seconds}
    whole = fit(peer, model, inputs, targets, device, budget=2**50, **options).plan.timeline.peak_bytes
    lasting = sum(t.nbytes for t in (*model.parameters(), *model.parameters(), *model.buffers(), *inputs, *targets))
    for share in _SHARES:
        budget = lasting + int(share * (whole - lasting))
        try:
            fitted = fit(peer, model, inputs, targets, device, budget=budget, **options)
        except InfeasibleBudget as refusal:
            budget = int((refusal.minimum_bytes or budget) * 1.1)
            fitted = fit(peer, model, inputs, targets, device, budget=budget, **options)
        yield row("memfit", lambda fitted=fitted: fitted(*inputs, *targets), budget_bytes=budget, share=share)
