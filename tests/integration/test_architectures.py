"""Architectures of three libraries: what a step is cut into regions for gives the plain model's loss and gradients, compiled or op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.parts.census.architectures import make, names
from torch import nn
from torch.utils._pytree import tree_map

import memfit
from memfit.compilers.inductor.compiler import Inductor
from memfit.kernels.compiler import PlainOps

QUICK = (
    "transformers:causal:gpt2",
    "transformers:causal:gemma2",
    "transformers:causal:opt",
    "transformers:masked:bert",
    "transformers:speech:whisper",
    "transformers:image:vit",
    "transformers:masked:distilbert",
    "timm:image:mobilevit_xxs",
    "torchvision:image:alexnet",
    "torchvision:image:squeezenet1_1",
)
EVERY = 8  # of all that the census finds: about sixty


def make_quiet(name: str) -> tuple[nn.Module, Any, Any, tuple[Any, ...]]:
    """In double precision (but for what a model casts to single), and nothing drawn at random: compiled kernels draw other numbers."""
    model, example, loss_fn, targets = make(name)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(module).__name__)):
                setattr(module, key, 0.0)
    wide = tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, example)
    return model.double(), wide, loss_fn, targets


def step(model: Any, example: Any, loss_fn: Any, targets: tuple[Any, ...], *, fitted: bool = False) -> tuple[torch.Tensor, list[Any]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    output = model(**example) if isinstance(example, dict) else model(*example, *(targets if fitted else ()))
    loss = output.loss if loss_fn is None else output if fitted else loss_fn(output, *targets)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def check(name: str) -> None:
    (model, example, loss_fn, targets), (plain, *_) = make_quiet(name), make_quiet(name)
    options: dict[str, Any] = {} if loss_fn is None else {"loss_fn": loss_fn, "example_targets": targets}
    fitted = memfit.fit(model, example, budget="1TiB", planner="keep_all", engine="inductor", check=False, **options)
    assert fitted._memfit.latest.ready.captured.compiled  # type: ignore[union-attr]
    for _ in range(2):
        (ours, gradients), (expected, wanted) = step(fitted, example, loss_fn, targets, fitted=True), step(plain, example, loss_fn, targets)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8)
        scale = max(float(g.abs().max()) for g in wanted if g is not None)
        for (parameter, _), a, b in zip(model.named_parameters(), gradients, wanted, strict=True):
            assert (a is None) == (b is None), parameter
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6 * scale, msg=lambda m, parameter=parameter: f"{parameter} {m}")


@pytest.mark.parametrize("name", QUICK)
def test_regions_op_by_op_are_the_plain_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inductor, "compile", lambda self, module, samples: PlainOps().compile(module, samples))
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", names()[::EVERY])
def test_compiled_regions_are_the_plain_step(name: str) -> None:
    try:
        model, example, loss_fn, targets = make_quiet(name)
        step(model, example, loss_fn, targets)
    except Exception as error:
        pytest.skip(f"the plain model does not run: {type(error).__name__}")
    try:
        check(name)
    except memfit.Unsupported as refusal:
        pytest.skip(f"refused by name: {refusal}")
