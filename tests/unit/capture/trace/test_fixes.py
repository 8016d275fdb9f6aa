"""What tracing says an op gives is what its kernel gives: shape, strides, type, and bytes behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.models.zoo import ZOO, make
from tests.training import batch, deep
from torch import nn

import memfit
from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call, Inputs
from memfit.pipeline.capture import capture
from memfit.profile.measure import _real_arguments


def differences(captured: Captured) -> list[str]:
    """Ops whose real outputs, on invented inputs of the traced layout, differ from the traced ones."""
    found = []
    for i, call in enumerate(captured.calls):
        if call.role is not Role.CALL or captured.is_free(i):
            continue
        args, kwargs = _real_arguments(captured, call)
        with torch.no_grad():
            outputs: Any = call.target(*args, **kwargs)  # type: ignore[misc]
        for tensor, real in zip(call.outputs, outputs if call.unpack else (outputs,), strict=True):
            sample = None if tensor is None else captured.samples[tensor]
            if sample is None or real is None or sample.numel() == 0:
                continue
            if (sample.shape, sample.stride(), sample.dtype) != (real.shape, real.stride(), real.dtype):
                found.append(f"{call.target}: traced {sample.stride()} {sample.dtype}, real {real.stride()} {real.dtype}")
            elif captured.graph.size_of(tensor) != real.untyped_storage().nbytes():
                found.append(f"{call.target}: traced {captured.graph.size_of(tensor)} bytes, real {real.untyped_storage().nbytes()}")
    return found


class Transposed(nn.Module):
    """LayerNorm and dropout on transposed inputs, as in an MLP-mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.mix = nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.drop(self.mix(x)).transpose(1, 2))
        return self.norm(self.drop(y)).square()


def test_layer_norm_and_dropout_on_transposed_inputs() -> None:
    assert differences(capture(Transposed(), Call.flatten((torch.randn(3, 6, 4),), {}))) == []


def test_convolutions_keep_the_layout_of_their_inputs() -> None:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(16, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    assert differences(capture(model, Call.flatten((x,), {}))) == []


def test_split_and_unbind_are_views() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.layer(x).chunk(2, dim=-1)
            return sum(part.sin() for part in (a * b).unbind(1))  # type: ignore[return-value]

    assert differences(capture(Parts(), Call.flatten((torch.randn(2, 3, 6),), {}))) == []


def test_batch_norm_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(deep(), Call.flatten((batch()[0],), {}))
    assert differences(captured) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dropout_of_any_rate_is_the_plain_models(dtype: torch.dtype) -> None:
    """The op that is traced and the plain model round 1/(1-p) differently for one rate in seven."""
    differ = []
    for percent in range(1, 100, 7):
        model, x = nn.Sequential(nn.Dropout(percent / 100), nn.Tanh()), torch.randn(512, dtype=dtype, requires_grad=True)
        results = []
        for step in (model, memfit.fit(model, (x,), budget="1MiB", check=False)):
            torch.manual_seed(percent)
            x.grad = None
            loss = step(x).sum()
            loss.backward()
            results.append((loss.detach(), x.grad))
        if not all(map(torch.equal, *results)):
            differ.append(percent)
    assert differ == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_the_whole_zoo(name: str) -> None:
    model, inputs, loss_fn, targets = make(name)
    given = Inputs.of(inputs)
    call = Call.flatten((*given.args, *targets), given.kwargs)
    assert differences(capture(model, call, loss_fn=loss_fn, num_targets=len(targets))) == []
