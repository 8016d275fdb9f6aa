"""ReLUs before max pools: masked by the pooled values, with the plain model's gradients, bit by bit; and where that is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.captured_steps import run
from tests.training import needs_a_compiler
from tests.without_passes import leave_out
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.passes.regions.piece import Region
from memfit.passes.regions.regions import gather_regions
from memfit.pipeline.capture import capture

aten = torch.ops.aten
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, pool: nn.Module, activation: nn.Module, *, bias: bool = True, norm: bool = False, skips: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8) if norm else nn.Identity(), activation)
        self.pool, self.second = pool, nn.Conv2d(8, 4, 3)
        self.last, self.skips = nn.Linear(4, 5), skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        result = self.second(self.pool(wide)).mean((2, 3))
        made: torch.Tensor = self.last(result + wide.mean((2, 3))[:, :4] if self.skips else result)
        return made


def captured_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Captured:
    return capture(model, Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=Inductor())


def data(*, channels_last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 19, 19, dtype=torch.float64)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x, torch.randint(0, 5, (4,))


def masks(captured: Captured) -> list[int]:
    """Elements of values that are compared with zero."""
    compared = (call for call in captured.calls if call.target is aten.le.Scalar)
    return [sample.numel() for call in compared if (sample := captured.samples[call.args[0].tensor]) is not None]


POOLS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d(2, 3),
    nn.MaxPool2d((3, 2), (2, 2), (1, 0)),
]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_mask_is_of_the_pooled_values_and_the_gradients_are_the_same(pool: nn.Module, bias: bool, channels_last: bool) -> None:
    model, (x, y) = Net(pool, nn.ReLU(), bias=bias).double(), data(channels_last=channels_last)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    captured = captured_of(model, x, y)
    assert masks(captured) == [model.pool(model.first(x)).numel()]
    found, _ = run(captured, model, x, y)
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-11, atol=1e-13)


def test_in_half_precision_too() -> None:
    model, (x, y) = Net(nn.MaxPool2d(2), nn.ReLU()), data()
    with torch.autocast("cpu", torch.bfloat16):
        captured = captured_of(model, x.float(), y)
    assert masks(captured) == [model.pool(model.first(x.float())).numel()]


@needs_a_compiler
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Identity()], ids=str)
def test_regions_give_the_layouts_that_were_promised(activation: nn.Module) -> None:
    model, (x, y) = Net(nn.MaxPool2d(2), activation).to(memory_format=torch.channels_last), data(channels_last=True)  # type: ignore[call-overload]
    captured = gather_regions(captured_of(model, x.float(), y), Inductor())
    forms = [captured.call(op.id, form) for op in captured.graph.ops for form in range(len(op.forms))]
    regions = [call for call in forms if isinstance(call.target, Region)]
    assert regions
    for call in regions:
        inputs = [captured.samples[a.tensor] for a in call.args]
        real = [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype).zero_() for s in inputs if s is not None]
        made = call.target(*real)  # type: ignore[misc]
        for tensor, value in zip(call.outputs, made, strict=True):
            sample = None if tensor is None else captured.samples[tensor]
            assert sample is None or (value.shape, value.stride()) == (sample.shape, sample.stride())


def test_infinities_and_not_a_number_go_the_same_way() -> None:
    model, (x, y) = Net(nn.MaxPool2d(2), nn.ReLU()).double(), data()
    x[0, 0, 3, 3], x[1, 1, 5, 5] = float("nan"), float("inf")
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    found, _ = run(captured_of(model, x, y), model, x, y)
    for position, parameter in enumerate(plain.parameters()):
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Net(nn.MaxPool2d(2), nn.ReLU(), norm=True),
        lambda: Net(nn.MaxPool2d(2), nn.ReLU(), skips=True),
        lambda: Net(nn.MaxPool2d(3, 1, 1), nn.ReLU()),
        lambda: Net(nn.AvgPool2d(2), nn.ReLU()),
    ],
    ids=["normalisation", "skip", "as large as before", "average"],
)
def test_left_alone(build: Callable[[], Net]) -> None:
    model, (x, y) = build().double(), data()
    assert masks(captured_of(model, x, y)) == [model.first(x).numel()]


def test_less_is_kept_for_backward() -> None:
    layers: list[nn.Module] = []
    for inner, width in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    x, y = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
    kept = []
    for left_out in (("relu-before-pool",), ()):
        with pytest.MonkeyPatch.context() as patch:
            leave_out(patch, *left_out)
            captured = captured_of(model, x, y)
        graph, boundary = captured.graph, captured.boundary
        read = {graph.storage_of(t) for op in graph.ops[boundary + 1 :] for t in op.inputs}
        made = {graph.storage_of(t) for op in graph.ops[:boundary] for t in op.outputs}
        kept.append(sum(graph.storages[s].size_bytes for s in read & made))
    assert kept[1] < 0.7 * kept[0]
