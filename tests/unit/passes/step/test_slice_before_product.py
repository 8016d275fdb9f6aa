"""Rows sliced before a product instead of after it: the same loss and gradients, and no more rows than are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.passes.step.test_losses_in_rows import WORDS, Head, Loss, assert_same_step, cross, data, num_slices, old_shift
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.passes.check import check_captured
from memfit.passes.step.losses_in_rows import slice_losses
from memfit.passes.step.slice_before_product import slice_before_products
from memfit.pipeline.capture import capture

aten = torch.ops.aten


def products(captured: Captured) -> list[int]:
    return [
        op.id for op in captured.graph.ops[: captured.boundary] if captured.calls[op.id].target in (aten.mm.default, aten.addmm.default)
    ]


def moved(captured: Captured) -> Captured:
    return slice_before_products(captured, products)


def rows_of(captured: Captured) -> list[int]:
    """Of what forward's products make."""
    return [captured.samples[captured.graph.ops[op].outputs[0]].shape[0] for op in products(captured)]  # type: ignore[union-attr]


def middle(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> torch.Tensor:
    """As a model does whose sequences begin with an image."""
    return cross(logits[:, 3:-2].reshape(-1, WORDS), labels[:, 3:-2].reshape(-1))


def uncopied(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> torch.Tensor:
    return cross(logits[:, :-1].transpose(1, 2), labels[:, 1:])


SLICED: dict[str, tuple[Loss, int]] = {"shifted": (old_shift, 4 * 11), "middle": (middle, 4 * 7)}


@pytest.mark.parametrize("form", SLICED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_row_is_made_that_nobody_reads(form: str, bias: bool, compiled: bool) -> None:
    loss, rows = SLICED[form]
    model, call = Head(loss, bias=bias).double(), Call.flatten(data(), {})
    whole = capture(model, call, compiler=Inductor(pads=False) if compiled else None)
    assert rows_of(whole) == [48]
    captured = moved(whole)
    check_captured(captured)
    assert rows_of(captured) == [rows]
    assert not any("slice_backward" in op.name or "slice_scatter" in op.name for op in captured.graph.ops)
    for op, call_of in zip(captured.graph.ops, captured.calls, strict=True):
        if call_of.target in (aten.view.default, aten._unsafe_view.default):
            assert captured.graph.is_view(op, op.outputs[0]), "a view with bytes of its own"
    if not compiled:
        assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_shifted_logits_are_cut_by_rows_whatever_the_batch(batch: int) -> None:
    model, call = Head(old_shift).double(), Call.flatten(data(batch, 48 // batch), {})
    captured = slice_losses(capture(model, call), least_fraction=0.0)
    assert captured is not None
    assert num_slices(captured) >= 8
    assert_same_step(captured, model, call, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", ["head", "embed"])
def test_frozen_on_either_side(frozen: str) -> None:
    model, call = Head(old_shift, bias=True).double(), Call.flatten(data(), {})
    getattr(model, frozen).requires_grad_(False)
    assert_same_step(moved(capture(model, call)), model, call, rtol=1e-10, atol=1e-10)


def test_what_somebody_else_reads_is_not_moved() -> None:
    def both(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> torch.Tensor:
        return old_shift(logits, labels, model) + logits.square().mean()

    def classes(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> torch.Tensor:
        return logits[..., :-1].square().mean()

    def every_other(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> torch.Tensor:
        return cross(logits[:, ::2].reshape(-1, WORDS), labels[:, ::2].reshape(-1))

    for loss in (both, classes, every_other, uncopied):
        whole = capture(Head(loss), Call.flatten(data(), {}))
        assert moved(whole) is whole


def test_without_a_backward() -> None:
    model, call = Head(old_shift), Call.flatten(data(), {})
    captured = moved(capture(nn.Module.eval(model), call, training=False))
    assert rows_of(captured) == [44]
