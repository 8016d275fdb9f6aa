"""Gradients of concatenations by parts: where, with which values, and in how many bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.costs import uniform_costs
from memfit.core.simulate import simulate
from memfit.kernels.concat_gradients import GradientOfPart
from memfit.passes.interface import Context
from memfit.passes.regions.regions import gather_regions
from memfit.passes.run import offer_choices
from memfit.passes.step.concat_gradients import split_concat_gradients
from memfit.pipeline.capture import capture
from memfit.pipeline.known_costs import signature
from memfit.planning import plan
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.profile.roofline import roofline
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate
from memfit.torch_private.allocations import peaks_of


class Skips(nn.Module):
    """Two levels of a UNet, with biases everywhere."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)])
        self.norm = nn.BatchNorm2d(width)
        self.bottom = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)])
        self.merge = nn.ModuleList([nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(4 * width, 2 * width, 3, padding=1)])
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.relu(self.norm(self.down[0](x)))
        second = nn.functional.relu(self.down[1](nn.functional.max_pool2d(first, 2)))
        x = self.bottom(nn.functional.max_pool2d(second, 2))
        x = nn.functional.relu(self.merge[1](torch.cat([second, self.up[1](x)], 1)))
        x = nn.functional.relu(self.merge[0](torch.cat([first, self.up[0](x)], -3)))
        return self.head(x).mean((2, 3))


class Branches(nn.Module):
    """Parts that convolutions make, side by side, and what reads them all."""

    def __init__(self, kind: type[nn.Module] = nn.Conv2d, widths: tuple[int, ...] = (3, 4, 5), bias: bool = True, **geometry: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList([kind(3, width, 1) for width in widths])
        self.reader = kind(sum(widths), 6, 3, bias=bias, **geometry)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.reader(torch.cat([torch.tanh(part(x)) for part in self.parts], 1))
        return read.flatten(2).mean(2)


def data(*sizes: int) -> Call:
    torch.manual_seed(1)
    return Call.flatten((torch.randn(6, 3, *(sizes or (16, 16)), dtype=torch.float64), torch.randint(0, 5, (6,))), {})


def step(model: nn.Module, call: Call, *, compiled: bool = False) -> Captured:
    compiler = Inductor() if compiled else None
    return capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=compiler)


def by_parts(captured: Captured, *, compiled: bool = False) -> Captured | None:
    return split_concat_gradients(captured, Inductor() if compiled else None, least_fraction=0.0, least_channels=1)


def is_by_parts(captured: Captured) -> int:
    return sum(isinstance(call.target, GradientOfPart) for call in captured.calls)


def assert_plain_gradients(captured: Captured, model: nn.Module, call: Call, variant: str = "") -> int:
    """Runs every op once, those that have it in the variant; the peak beyond what was there before."""
    graph = captured.graph
    names = {op.id: [v.name for v in op.variants] for op in graph.ops}
    sequence = [(op.id, names[op.id].index(variant) + 1 if variant in names[op.id] else 0) for op in graph.ops]
    schedule = schedule_from_ops(graph, sequence)
    simulate(graph, schedule)
    keep = plan(graph, planner="keep_all").require_plan()
    ready = Ready(
        captured=captured,
        costs=uniform_costs(graph),
        plan=keep,
        program=generate(captured, schedule),
        keep_all_peak_bytes=0,
        base_time_ns=0,
    )
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    nn.functional.cross_entropy(plain(call.tensors[0]), call.tensors[1]).backward()
    sources = (*ours.parameters(), *ours.buffers(), *call.tensors)
    _, peak = peaks_of(lambda: run(Session(ready, sources, trial=False, replan=lambda _: None)).backward(), torch.device("cpu"))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)
    return peak


@pytest.mark.parametrize("variant", ["", "from parts"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_small_unet(layout: torch.memory_format, compiled: bool, variant: str) -> None:
    torch.manual_seed(0)
    model = Skips().double().to(memory_format=layout)  # type: ignore[call-overload]
    call = data()
    call = Call.flatten((call.tensors[0].contiguous(memory_format=layout), call.tensors[1]), {})
    captured = step(model, call, compiled=compiled)
    found = by_parts(captured, compiled=compiled)
    assert found is not None
    assert is_by_parts(found) == 4
    assert sum(v.name == "from parts" for op in found.graph.ops for v in op.variants) == 2
    for op in found.graph.ops:  # channels that follow each other stay so
        if isinstance(found.calls[op.id].target, GradientOfPart):
            sample = found.samples[op.outputs[0]]
            assert sample is not None
            assert sample.is_contiguous(memory_format=layout)
    assert_plain_gradients(found, model, call, variant)


@pytest.mark.parametrize("variant", ["", "from parts"])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Branches(stride=2, dilation=2, padding=1), (13, 11)),
        (Branches(bias=False, widths=(1, 7)), (9, 9)),
        (Branches(nn.Conv1d, widths=(4, 4, 8), padding=2), (17,)),
        (Branches(nn.Conv3d, widths=(2, 2, 2), stride=(1, 2, 1)), (5, 6, 7)),
    ],
)
def test_three_parts_strides_dilations_and_other_dimensions(model: nn.Module, sizes: tuple[int, ...], variant: str) -> None:
    model, call = model.double(), data(*sizes)
    found = by_parts(step(model, call))
    assert found is not None
    assert is_by_parts(found) == len(model.parts)  # type: ignore[arg-type]
    assert_plain_gradients(found, model, call, variant)


@pytest.mark.parametrize("frozen", ["reader.weight", "reader.bias", "reader", "parts.1"])
@pytest.mark.parametrize("variant", ["", "from parts"])
def test_frozen_parameters(frozen: str, variant: str) -> None:
    model, call = Branches().double(), data()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    found = by_parts(step(model, call))
    assert found is not None
    assert is_by_parts(found) == 3 - (frozen == "parts.1")  # a part without gradients is not worked out
    assert_plain_gradients(found, model, call, variant)


class BesideItsInput(nn.Module):
    """What a convolution makes of the input, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.reader = nn.Conv2d(3, 5, 1), nn.Conv2d(8, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.reader(torch.cat([x, torch.tanh(self.part(x.detach()))], 1))
        return read.mean((2, 3))


@pytest.mark.parametrize("variant", ["", "from parts"])
def test_a_part_without_a_gradient_has_none_worked_out(variant: str) -> None:
    model, call = BesideItsInput().double(), data()
    found = by_parts(step(model, call))
    assert found is not None
    assert is_by_parts(found) == 1
    assert_plain_gradients(found, model, call, variant)


def test_a_gradient_that_is_given_to_the_caller_stays_a_slice() -> None:
    model, call = BesideItsInput().double(), data()
    call.tensors[0].requires_grad_()
    assert by_parts(step(model, call)) is None


class BesidesPooled(Branches):
    """The concatenation has a second reader: its gradient is a sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([torch.tanh(part(x)) for part in self.parts], 1)
        return (self.reader(whole) + nn.functional.avg_pool2d(whole, 3, 1)[:, :6]).mean((2, 3))


class AlongRows(Branches):
    def __init__(self) -> None:
        super().__init__(widths=(4, 4))
        self.reader = nn.Conv2d(4, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.reader(torch.cat([torch.tanh(part(x)) for part in self.parts], 2))
        return read.mean((2, 3))


@pytest.mark.parametrize(
    "model",
    [
        BesidesPooled(),
        AlongRows(),
        Branches(widths=(4, 4), groups=2),
        Branches(nn.ConvTranspose2d, widths=(4, 4)),
        nn.Sequential(nn.Conv2d(3, 5, 16), nn.Flatten()),
    ],
    ids=lambda model: type(model).__name__,
)
def test_no_candidates(model: nn.Module) -> None:
    assert by_parts(step(model.double(), data())) is None


def test_few_channels_and_small_gradients_are_left() -> None:
    captured = step(Branches(widths=(16, 16)).double(), data())
    assert split_concat_gradients(captured) is not None
    assert split_concat_gradients(captured, least_channels=17) is None
    assert split_concat_gradients(captured, least_fraction=2.0) is None


def test_the_peak_falls_by_the_parts_that_are_no_longer_held() -> None:
    torch.manual_seed(0)
    model, call = Skips(8).double(), data(32, 32)
    captured = step(model, call)
    found = by_parts(captured)
    assert found is not None
    least = [plan(c.graph, budget=1, time_limit_s=5).lower_bound_bytes for c in (captured, found)]
    assert least[1] < 0.85 * least[0]
    assert assert_plain_gradients(found, model, call) < assert_plain_gradients(captured, model, call)


def test_forms_that_were_offered_before_stay_and_costs_know_the_parts() -> None:
    model, call = Skips().double(), data()
    found = by_parts(step(model, call))
    assert found is not None
    names = [v.name for op in offer_choices(found, "eager", Context(least_fraction=0.0)).graph.ops for v in op.variants]
    assert names.count("from parts") == 2
    assert "8 slices" in names
    costs, whole = roofline(found, "h200"), roofline(step(model, call), "h200")
    parts = [op.id for op in found.graph.ops if isinstance(found.calls[op.id].target, GradientOfPart)]
    assert min(costs.op_time_ns[op] for op in parts) > 0
    assert sum(costs.op_time_ns) < 1.2 * sum(whole.op_time_ns)
    assert len({signature(found, op) for op in parts}) == 4  # measured each by itself


class Layouts(TorchDispatchMode):
    """What strides convolutions give their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.strides.append(result.stride())
        return result


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("strided", [False, True])
def test_the_kernel_works_in_the_layout_that_is_asked_for(layout: torch.memory_format, width: int, strided: bool) -> None:
    """The weight of a 1x1 convolution has both layouts at once, and PyTorch would take the other."""
    gradient = torch.randn(2, 6, 12, 12).contiguous(memory_format=layout)
    weight = torch.randn(6, 8, width, width)
    weight = weight.contiguous(memory_format=layout) if strided else weight
    geometry = ([1, 1], [width // 2, width // 2], [1, 1], False, [0, 0], 1)
    shape = (2, 5, 12, 12)
    strides = torch.empty(shape).contiguous(memory_format=layout).stride()
    of_part = GradientOfPart(start=3, stop=8, shape=shape, strides=strides, stride=(1, 1), padding=(width // 2,) * 2, dilation=(1, 1))
    with Layouts() as seen:
        part = of_part(gradient, weight)
    assert seen.strides == [strides]
    assert part.stride() == strides
    x = torch.zeros(2, 8, 12, 12).contiguous(memory_format=layout)
    whole = torch.ops.aten.convolution_backward.default(gradient, x, weight, None, *geometry, [True, False, False])[0]
    torch.testing.assert_close(part, whole[:, 3:], rtol=1e-4, atol=1e-5)


def test_a_compiled_step_makes_the_part_again_beside_the_concatenation() -> None:
    """What `up` gives goes into the concatenation with its bias added on the way: it exists nowhere else."""
    model, call = Skips().double(), data()
    fine = by_parts(step(model, call, compiled=True), compiled=True)
    assert fine is not None
    coarse = gather_regions(offer_choices(fine, "inductor", Context(compiler=Inductor())), Inductor(), least_fraction=0.0).graph
    for op in coarse.ops:
        for variant in op.variants:
            if variant.name == "from parts":
                whole = next(t for t in op.inputs if t not in variant.inputs)
                parts = [t for t in variant.inputs if t not in op.inputs]
                assert len(parts) == 2
                assert sum(map(coarse.size_of, parts)) == coarse.size_of(whole)
                assert all(coarse.producers[t] for t in parts)
                makers = [coarse.ops[coarse.producers[t][0]] for t in parts]
                assert all(whole not in (*maker.inputs, *maker.outputs) for maker in makers)
    assert sum(v.name == "from parts" for op in coarse.ops for v in op.variants) == 2
