"""Networks of several kinds with blocks in slices, each way that is offered: the plain model's gradients in 64 bits, strides included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.costs import uniform_costs
from memfit.passes.slicing.slice_blocks import slice_blocks
from memfit.pipeline.capture import capture
from memfit.planning import plan as find_plan
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate

torch.set_num_threads(1)  # more threads wait for each other on a busy machine


class Residual(nn.Module):
    """As a ResNet whose statistics are frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norms[1](self.two(torch.relu(self.norms[0](self.one(x))))))


class Fire(nn.Module):
    """As in SqueezeNet: two ways side by side."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.squeeze, self.one, self.three = nn.Conv2d(inner, 4, 1), nn.Conv2d(4, outer, 1), nn.Conv2d(4, outer, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)


class Modern(nn.Module):
    """As ConvNeXt: depthwise, a norm of each place, a wide middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(nn.functional.gelu(self.wide(y)))).permute(0, 3, 1, 2)


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)]


def frozen_resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, Residual(8), Residual(8), nn.MaxPool2d(2), Residual(8), *head(8)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 1.0)
    return model


def squeezenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(12, 8), nn.AvgPool2d(2), Fire(16, 8), *head(16)
    )


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 2, 2), Modern(8), Modern(8), nn.Conv2d(8, 12, 2, 2), Modern(12), *head(12))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("build", [frozen_resnet, squeezenet, convnext])
def test_gradients_are_the_plain_model_s(build: object, channels_last: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = build().double()  # type: ignore[operator]
    x, y = torch.randn(7, 3, 24, 24, dtype=torch.float64), torch.randint(0, 5, (7,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    call = Call.flatten((x, y), {})
    captured = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=Inductor() if compiled else None)
    forms = list(slice_blocks(captured, None, num_slices=3))  # slices of three, and a last one of one
    assert forms
    for form in forms:
        ours = copy.deepcopy(model)
        run(Session(ready(form), (*ours.parameters(), *ours.buffers(), *call.tensors), trial=False, replan=lambda _: None)).backward()
        for (label, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is not None, label
            assert b.grad is not None, label
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13, msg=lambda text, label=label: f"{label}: {text}")


def ready(captured: Captured) -> Ready:
    costs = uniform_costs(captured.graph)
    plan = find_plan(captured.graph, costs, None, planner="keep_all").require_plan()
    program = generate(captured, plan.schedule)
    return Ready(captured=captured, costs=costs, plan=plan, program=program, keep_all_peak_bytes=0, base_time_ns=0)
