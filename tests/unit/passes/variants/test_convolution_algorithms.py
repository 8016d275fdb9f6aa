"""Convolutions by other algorithms: which are offered, and that each gives the gradients of the plain model.

The cuDNN behind these tests is `fake_cudnn.c`: its names, arguments and structures are cuDNN's, its memory the host's.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.passes.variants.test_choices import gradients_of, plain_gradients, setting
from torch import nn

from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.graph import Op
from memfit.core.simulate import simulate
from memfit.kernels import convolution_algorithms as kernels
from memfit.kernels import cudnn as cudnn_algorithms
from memfit.kernels.convolution_algorithms import Choice, ConvolutionBackwardBy, ConvolutionBy, _expect_strides
from memfit.kernels.cudnn import Algorithm, Convolution, CudnnError, Direction, Library, strides_of
from memfit.passes.interface import Context
from memfit.passes.regions.regions import gather_regions
from memfit.passes.run import offer_choices
from memfit.passes.variants import convolution_algorithms
from memfit.passes.variants.convolution_algorithms import (
    _strides_of_part,
    by_limit,
    few,
)
from memfit.pipeline.capture import capture
from memfit.pipeline.costs import measure_costs
from memfit.pipeline.known_costs import Cache
from memfit.planning.model.to_schedule import schedule_from_ops

aten = torch.ops.aten
_OPTIONAL = ("memfit.pack_bits", "memfit.narrow_indices", "memfit.norm_apply")


@pytest.fixture(scope="module")
def cudnn(tmp_path_factory: pytest.TempPathFactory) -> Library:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("cudnn") / "libfakecudnn.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(path), str(Path(__file__).with_name("fake_cudnn.c"))], check=True)
    return Library(str(path), device_type="cpu")


@pytest.fixture
def here(cudnn: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """As if this machine had a cuDNN for the host's memory."""
    for module in (convolution_algorithms, kernels):
        monkeypatch.setattr(module, "library", lambda: cudnn)
    return cudnn


def named(number: int, workspace_bytes: int, **more: Any) -> Algorithm:
    return Algorithm(number=number, math=0, workspace_bytes=workspace_bytes, **more)


# -- which are offered -------------------------------------------------------------------------------------------------


def test_a_limit_holds_for_all_passes_of_an_op() -> None:
    data = [named(5, 900), named(1, 300), named(0, 0)]
    weight = [named(3, 500), named(6, 700), named(1, 100)]
    found = [tuple(a.number for a in pick) for pick in by_limit([data, weight])]
    assert found == [(5, 3), (1, 3), (1, 1), (0, 1)]  # within 900, 500, 300 and 100 bytes; with less the weight's gradient has none


def test_each_pick_takes_less_than_the_one_before() -> None:
    lists = [[named(i, w) for i, w in enumerate((40, 90, 10, 70, 0))], [named(i, w) for i, w in enumerate((35, 5, 60, 0))]]
    sizes = [max(a.workspace_bytes for a in pick) for pick in by_limit(lists)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == 0


def test_a_workspace_too_small_to_matter_is_none() -> None:
    assert by_limit([[named(7, 50), named(1, 0)]], nothing_bytes=64) == [(named(7, 50),)]


def test_at_most_two_are_offered_and_the_smallest_is_among_them() -> None:
    picks = by_limit([[named(i, 100 - 10 * i) for i in range(6)]])
    assert [pick[0].number for pick in few(picks)] == [0, 5]
    assert few(picks[:1]) == picks[:1]


def test_no_algorithm_at_all() -> None:
    assert by_limit([[named(1, 0)], []]) == []


def test_without_a_gpu_there_is_no_library_and_nothing_is_offered() -> None:
    assert cudnn_algorithms.library() is None or torch.cuda.is_available()
    model, call = setting()
    plain = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    if not torch.cuda.is_available():
        assert offer_choices(plain, "inductor", Context(least_fraction=0.0)) is plain


def test_a_model_on_the_cpu_beside_a_gpu_is_offered_nothing(here: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would take the host's addresses for its own."""
    model, call = setting()
    plain = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    assert offer_choices(plain, "inductor", Context(least_fraction=0.0)) is not plain
    monkeypatch.setattr(here, "device_type", "cuda")
    assert offer_choices(plain, "inductor", Context(least_fraction=0.0)) is plain


def test_only_deterministic_ones_where_that_is_asked_for(here: Library) -> None:
    model, call = setting()
    plain = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    torch.use_deterministic_algorithms(True)
    try:
        offered = offer_choices(plain, "inductor", Context(least_fraction=0.0))
    finally:
        torch.use_deterministic_algorithms(False)
    numbers = {v.name.split()[1] for op in offered.graph.ops for v in op.variants}
    assert {n for name in numbers for n in name.split("+")} == {"1"}, "7 is the fastest, so PyTorch's own"


def test_the_small_one_is_offered_though_the_fastest_takes_more_than_its_tensors(here: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN does for the weight's gradient of a first layer: 710 MiB beside 668."""
    listed = (named(1, 10**9), named(0, 0))
    monkeypatch.setattr(here, "algorithms", lambda layer, which: listed)
    plain = capture(nn.Conv2d(3, 4, 3), Call.flatten((torch.randn(2, 3, 8, 8),), {}))
    offered = offer_choices(plain, "inductor", Context(least_fraction=0.0))
    names = [v.name for op in offered.graph.ops for v in op.variants]
    assert names == ["algorithm 0 in 0 B", "algorithm 0 in 0 B"], "the forward's, and the weight's gradient"


def test_none_with_a_workspace_larger_than_what_it_works_on(here: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (named(7, 10**9), named(6, 10**8), named(1, 0))
    monkeypatch.setattr(here, "algorithms", lambda layer, which: listed)
    plain = capture(nn.Conv2d(3, 4, 3), Call.flatten((torch.randn(2, 3, 8, 8),), {}))
    offered = offer_choices(plain, "inductor", Context(least_fraction=0.0))
    assert {v.name for op in offered.graph.ops for v in op.variants} == {"algorithm 1 in 0 B"}


# -- the library's calls -----------------------------------------------------------------------------------------------


def shapes(
    *, transposed: bool = False, channels_last: bool = False, groups: int = 1, stride: int = 1, dilation: int = 1
) -> tuple[Any, ...]:
    """(x, weight, bias, settings of aten.convolution)."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 9, 7, dtype=torch.float64)
    weight = torch.randn(4 if transposed else 6, (6 if transposed else 4) // groups, 3, 2, dtype=torch.float64)
    if channels_last:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    extra = [stride - 1] * 2 if transposed else [0, 0]
    return x, weight, torch.randn(6, dtype=torch.float64), ([stride] * 2, [1, 1], [dilation] * 2, transposed, extra, groups)


CASES = [
    {},
    {"channels_last": True},
    {"groups": 2},
    {"stride": 2},
    {"dilation": 2, "channels_last": True},
    {"transposed": True, "stride": 2},
    {"transposed": True, "stride": 2, "groups": 2, "channels_last": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_algorithm_gives_what_aten_gives(here: Library, case: dict[str, Any], dtype: torch.dtype) -> None:
    x, weight, bias, settings = shapes(**case)
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    transposed, last = settings[3], case.get("channels_last", False)
    expected = aten.convolution.default(x, weight, bias, *settings)
    expected = expected.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    big, small = (expected, x) if transposed else (x, expected)
    layer = Convolution(
        dtype=dtype,
        channels_last=last,
        input=tuple(big.shape),
        weight=tuple(weight.shape),
        output=tuple(small.shape),
        padding=(1, 1),
        stride=tuple(settings[0]),
        dilation=tuple(settings[2]),
        groups=settings[5],
        tf32=False,
    )
    gradient = torch.randn_like(expected)
    rest = ([6], *settings, [True, True, True])
    wanted = aten.convolution_backward.default(gradient, x, weight, *rest)
    forward, back = (Direction.DATA, Direction.FORWARD) if transposed else (Direction.FORWARD, Direction.DATA)
    strides = tuple(strides_of(t.shape, channels_last=last) for t in (x, weight))
    for number in (7, 6, 1):
        one = {p: next(a for a in here.algorithms(layer, p) if a.number == number) for p in Direction}
        choice = Choice(convolution=layer, algorithms=((forward, one[forward]),), strides=(expected.stride(),))
        made = ConvolutionBy(choice)(x, weight, bias, *settings)
        assert made.stride() == expected.stride()
        torch.testing.assert_close(made, expected)
        both = Choice(convolution=layer, algorithms=((back, one[back]), (Direction.FILTER, one[Direction.FILTER])), strides=strides)
        for a, b in zip(ConvolutionBackwardBy(both)(gradient, x, weight, *rest), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def layer_of(x: torch.Tensor, weight: torch.Tensor, **more: Any) -> Convolution:
    out = (x.shape[0], weight.shape[0], *x.shape[2:])
    common: dict[str, Any] = {"padding": (1, 1), "stride": (1, 1), "dilation": (1, 1), "groups": 1, "tf32": False, "channels_last": False}
    return Convolution(**{"dtype": x.dtype, "input": tuple(x.shape), "weight": tuple(weight.shape), "output": out, **common, **more})


def test_what_the_library_says_of_an_algorithm(here: Library) -> None:
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    found = here.algorithms(layer_of(x, weight), Direction.FORWARD)
    assert [(a.number, a.workspace_bytes, a.deterministic) for a in found] == [(7, 300, True), (6, 60, False), (1, 0, True)]
    assert {a.math for a in found} == {3}, "without TF32 factors must not be rounded, whatever the library suggests"
    assert {a.math for a in here.algorithms(layer_of(x, weight, tf32=True), Direction.FORWARD)} == {0, 1}


def test_a_refused_call_says_what_and_why(here: Library) -> None:
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    with pytest.raises(CudnnError, match="cudnnConvolutionForward failed with status 3000, FAKE_NOT_SUPPORTED"):
        here.run(layer_of(x, weight), Direction.FORWARD, named(5, 0), x, weight, torch.empty(2, 4, 5, 5))
    volume = replace(layer_of(x, weight), input=(2, 3, 5, 5, 5))
    with pytest.raises(CudnnError, match="cudnnSetTensorNdDescriptor failed"):
        here.algorithms(volume, Direction.FORWARD)


def test_an_algorithm_that_does_not_run_is_done_by_pytorch(here: Library) -> None:
    x, weight, bias, settings = shapes()
    layer = layer_of(x, weight)
    refused = Choice(convolution=layer, algorithms=((Direction.FORWARD, named(5, 0)),), strides=((),))
    object.__setattr__(refused, "strides", ((6 * 9 * 8, 72, 8, 1),))
    expected = aten.convolution.default(x, weight, bias, *settings)
    assert torch.equal(ConvolutionBy(refused)(x, weight, bias, *settings), expected)
    both = Choice(
        convolution=layer,
        algorithms=((Direction.DATA, named(5, 0)), (Direction.FILTER, named(5, 0))),
        strides=(x.stride(), weight.stride()),
    )
    gradient, rest = torch.randn_like(expected), ([6], *settings, [True, True, True])
    for a, b in zip(
        ConvolutionBackwardBy(both)(gradient, x, weight, *rest),
        aten.convolution_backward.default(gradient, x, weight, *rest),
        strict=True,
    ):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((0, 3, 5, 5), torch.float32), ((1, 3, 5), torch.float32), ((2**16, 2**8, 2**8, 1), torch.int32)], ids=str
)
def test_what_the_interface_cannot_name(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.empty(shape, dtype=dtype, device="meta")
    assert not layer_of(like, torch.empty(4, 3, 3, 3, device="meta")).is_supported


def part_of(x: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """The same numbers as some channels of a larger tensor."""
    larger = torch.randn(x.shape[0], x.shape[1] + 8, *x.shape[2:], dtype=x.dtype)
    larger = larger.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    larger[:, 4 : 4 + x.shape[1]] = x
    return larger[:, 4 : 4 + x.shape[1]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_a_concatenation_are_read_where_they_lie(here: Library, case: dict[str, Any]) -> None:
    x, weight, bias, settings = shapes(**case)
    transposed, last = settings[3], case.get("channels_last", False)
    expected = aten.convolution.default(x, weight, bias, *settings)
    gradient = torch.randn_like(expected)
    rest = ([6], *settings, [True, True, True])
    wanted = aten.convolution_backward.default(gradient, x, weight, *rest)
    near, far = part_of(x, channels_last=last), part_of(gradient, channels_last=last)
    big, small = (far, near) if transposed else (near, far)
    layer = Convolution(
        dtype=x.dtype,
        channels_last=last,
        input=tuple(big.shape),
        weight=tuple(weight.shape),
        output=tuple(small.shape),
        padding=(1, 1),
        stride=tuple(settings[0]),
        dilation=tuple(settings[2]),
        groups=settings[5],
        tf32=False,
        input_strides=_strides_of_part(big, last),
        output_strides=_strides_of_part(small, last),
    )
    assert layer.input_strides == big.stride()
    assert layer.output_strides == small.stride()
    back = Direction.FORWARD if transposed else Direction.DATA
    strides = tuple(strides_of(t.shape, channels_last=last) for t in (x, weight))
    choice = Choice(convolution=layer, algorithms=((back, named(1, 0)), (Direction.FILTER, named(1, 0))), strides=strides)
    dense = replace(layer, input_strides=(), output_strides=())
    with pytest.raises(CudnnError, match="instead of"):
        _expect_strides(choice, x, layer.input_strides)
    for strided in (choice, replace(choice, convolution=dense)):
        made = ConvolutionBackwardBy(strided)(far, near, weight, *rest)
        for a, b in zip(made, wanted, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (2, 3, 5, 5)])
def test_what_is_no_part_of_a_larger_tensor_or_lies_askew(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert _strides_of_part(x, False) == ()
    assert _strides_of_part(x.transpose(2, 3), False) == ()
    assert _strides_of_part(x[:1].expand_as(x), False) == ()
    last = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    assert _strides_of_part(last[:, 1:5], True) == (), "not aligned"
    assert _strides_of_part(last[:, 4:], True) == last.stride()
    assert _strides_of_part(last[:, :, 1:], True) == (), "rows are missing"


class Joined(nn.Module):
    """The gradient of a concatenation comes back in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.ConvTranspose2d(4, 8, 3, padding=1)
        self.merge = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merge(torch.cat([self.one(x), self.two(x)], 1)).mean((2, 3))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_parts_of_a_concatenation_are_offered_without_a_copy(here: Library, compiled: bool) -> None:
    torch.manual_seed(0)
    model = Joined().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(8, 4, 16, 16).contiguous(memory_format=torch.channels_last)
    call = Call.flatten((x, torch.randint(0, 4, (8,))), {})
    fine = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=Inductor() if compiled else None)
    captured = offer_choices(fine, "inductor", Context(least_fraction=0.0))
    captured = gather_regions(captured, Inductor(), choices=False) if compiled else captured
    names = {op.id: [v.name for v in op.variants] for op in captured.graph.ops if op.name == "aten.convolution_backward.default"}
    names = {op: offered for op, offered in names.items() if "8 slices" in offered}
    assert len(names) == 2, "the two that are concatenated"
    assert all(any("without a copy" in name for name in offered) for offered in names.values()), names
    for wanted in ("8 slices", "without a copy"):
        chosen = {op: 1 + next(k for k, name in enumerate(n) if wanted in name) for op, n in names.items()}
        schedule = schedule_from_ops(captured.graph, [(op.id, chosen.get(op.id, 0)) for op in captured.graph.ops])
        simulate(captured.graph, schedule)
        ours = gradients_of(captured, schedule, model, call)
        for a, b in zip(ours, plain_gradients(model, call, nn.functional.cross_entropy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# -- in a whole step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("position", [0, -1])
def test_a_step_with_other_algorithms_everywhere(here: Library, channels_last: bool, position: int) -> None:
    model, call = setting()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = call.tensors[0].contiguous(memory_format=torch.channels_last)
        call = Call.flatten((x, call.tensors[1]), {})
    captured = offer_choices(capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1), "eager", Context(least_fraction=0.0))
    graph = captured.graph

    def chosen(op: Op) -> int:
        matching = [k + 1 for k, v in enumerate(op.variants) if v.name.startswith("algorithm")]
        return matching[position] if matching else 0

    schedule = schedule_from_ops(graph, [(op.id, chosen(op)) for op in graph.ops if op.name not in _OPTIONAL])
    simulate(graph, schedule)
    assert sum(step.variant > 0 for step in schedule.computes) == 4, "two convolutions, forward and backward"
    ours = gradients_of(captured, schedule, model, call)
    for a, b in zip(ours, plain_gradients(model, call, nn.functional.cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("position", [0, -1])
def test_the_workspace_is_weighed_with_the_op(here: Library, position: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1)
    plain = capture(model, Call.flatten((torch.randn(2, 3, 64, 64),), {}))
    captured = offer_choices(plain, "inductor", Context(least_fraction=0.0))
    costs = measure_costs(captured, cache=Cache(tmp_path))
    offered = [(op.id, len(op.variants) if position else 1) for op in captured.graph.ops if op.variants]
    assert len(offered) == 2
    for op, variant in offered:
        target = captured.call(op, variant).target
        assert isinstance(target, (ConvolutionBy, ConvolutionBackwardBy))
        expected, found = target.choice.workspace_bytes, costs.workspace(op, variant)
        assert expected == (0 if position else 4 * 2 * 3 * 64 * 64 // 10)
        assert abs(found - expected) < 1000  # the weight's gradient is not there yet when that of the input is made


def test_in_compiled_regions_too(here: Library) -> None:
    model, call = setting()
    model.drop = nn.Identity()  # compiled code draws other numbers
    fine = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=Inductor())
    captured = gather_regions(offer_choices(fine, "inductor", Context(least_fraction=0.0)), Inductor(), choices=False)
    chosen = {op.id: len(op.variants) for op in captured.graph.ops if any(v.name.startswith("algorithm") for v in op.variants)}
    assert len(chosen) == 4, "two convolutions, forward and backward, outside of every region"
    schedule = schedule_from_ops(captured.graph, [(op.id, chosen.get(op.id, 0)) for op in captured.graph.ops])
    simulate(captured.graph, schedule)
    for a, b in zip(gradients_of(captured, schedule, model, call), plain_gradients(model, call, nn.functional.cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_variant_that_cannot_run_here_is_never_worth_it(here: Library, tmp_path: Path) -> None:
    model, call = setting()
    plain = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    captured = offer_choices(plain, "inductor", Context(least_fraction=0.0))

    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel")

    calls = tuple(tuple(replace(c, target=broken) for c in forms) for forms in captured.variant_calls)
    costs = measure_costs(replace(captured, variant_calls=calls), cache=Cache(tmp_path))
    total = sum(s.size_bytes for s in captured.graph.storages)
    for op in captured.graph.ops:
        for variant in range(1, len(op.forms)):
            assert costs.workspace(op.id, variant) >= total
            assert costs.time_ns(op.id, variant) > costs.time_ns(op.id)
