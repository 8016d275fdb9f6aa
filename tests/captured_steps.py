"""A step captured for a compiler, run op by op, and held against the plain model. Imports torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memfit.capture.captured import Captured, Ref, Role
from memfit.capture.inputs import Call
from memfit.passes.regions.compiler import Compiler
from memfit.passes.regions.regions import gather_regions
from memfit.pipeline.capture import capture


def fine(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compiler: Compiler) -> Captured:
    return capture(model, Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=compiler)


def regions(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compiler: Compiler) -> Captured:
    return gather_regions(fine(model, x, y, compiler), compiler)


def run(captured: Captured, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[dict[int, torch.Tensor], dict[int, Any]]:
    """Gradients by position of their source, every op once; and what each op was given."""
    values: dict[int, torch.Tensor] = dict(zip(captured.convention.sources, (*model.parameters(), *model.buffers(), x, y), strict=True))
    found, inputs = {}, {}
    with torch.no_grad():
        for op, call in zip(captured.graph.ops, captured.calls, strict=True):
            if call.role is Role.BACKWARD_BEGINS:
                values.update((t, torch.ones((), dtype=x.dtype, device=x.device)) for t in op.outputs)
            elif call.role is Role.ACCUMULATE:
                found[call.index] = values[call.args[0].tensor]
            elif not all(t in values for t in op.outputs):
                args, kwargs = tree_map(lambda v: values[v.tensor] if isinstance(v, Ref) else v, (call.args, dict(call.kwargs)))
                inputs[op.id] = args
                made = call.target(*args, **kwargs)  # type: ignore[misc]
                outputs = made if call.unpack else (made,)
                values.update((t, v) for t, v in zip(call.outputs, outputs, strict=True) if t is not None)
    return found, inputs


def assert_plain(found: dict[int, torch.Tensor], model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, near: float = 1e-10) -> None:
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=near, atol=near * float(parameter.grad.abs().max()))
