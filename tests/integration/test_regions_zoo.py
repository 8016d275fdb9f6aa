"""Real architectures gathered into regions and planned: the plain model's gradients in 64 bits. Pieces run one by one, uncompiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from benchmarks.models.zoo import ZOO, make
from torch import nn

from memfit.capture.inputs import Call, Inputs
from memfit.compilers.inductor.compiler import Inductor
from memfit.passes.regions.regions import gather_regions
from memfit.pipeline.capture import capture
from memfit.planning import plan as find_plan
from memfit.profile.roofline import roofline
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate

QUICK = {"unet", "llama"}
NAMES = [n for n in ZOO if n != "diffusion_unet"]  # its time embedding is in 32 bits whatever the model is


class OneByOne(Inductor):
    """Traces and groups as Inductor, and leaves the pieces as they are."""

    def compile(
        self, module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]
    ) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        return lambda inputs: module(*inputs)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_gradients_are_the_plain_models(name: str) -> None:
    model, example, loss_fn, targets = make(name)
    model, inputs, targets = _exact(model, Inputs.of(example), targets)
    call = Call.flatten((*inputs.args, *targets), inputs.kwargs)
    coarse = gather_regions(capture(model, call, loss_fn=loss_fn, num_targets=len(targets), compiler=OneByOne()), OneByOne())
    assert not any(op.name.startswith("prims.inductor_seeds") for op in coarse.graph.ops)
    costs = roofline(coarse, "h200")
    whole = find_plan(coarse.graph, costs, None, planner="keep_all").require_plan()
    outcome = find_plan(coarse.graph, costs, int(whole.timeline.peak_bytes * 0.85), time_limit_s=5)
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    loss_fn(plain(*inputs.args, **inputs.kwargs), *targets).backward()
    plan = outcome.plan or whole
    ready = Ready(captured=coarse, costs=costs, plan=plan, program=generate(coarse, plan.schedule), keep_all_peak_bytes=0, base_time_ns=0)
    sources = (*planned.parameters(), *planned.buffers(), *call.tensors)
    run(Session(ready, sources, trial=False, replan=lambda _: None)).backward()
    for (label, ours), theirs in zip(planned.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), label
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7, msg=lambda text, label=label: f"{label}: {text}")
    for ours, theirs in zip(planned.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def _exact(model: nn.Module, inputs: Inputs, targets: tuple[Any, ...]) -> tuple[nn.Module, Inputs, tuple[Any, ...]]:
    """In 64 bits and without random numbers, which compiled code draws otherwise."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "drop_prob", "drop_rate", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    arguments = Inputs(*map(wide, inputs.args), **{k: wide(v) for k, v in inputs.kwargs.items()})
    return model.double(), arguments, tuple(map(wide, targets))
