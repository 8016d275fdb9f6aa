"""Every algorithm that cuDNN lists for a convolution: numbers as good as PyTorch's, the workspace it was said to take, in steps that fit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.inputs import Call
from memfit.core.costs import uniform_costs
from memfit.kernels.convolution_algorithms import Choice, ConvolutionBackwardBy, ConvolutionBy
from memfit.kernels.cudnn import Algorithm, Convolution, CudnnError, Direction, Library, library, strides_of
from memfit.passes.interface import Context
from memfit.passes.run import offer_choices
from memfit.pipeline.capture import capture
from memfit.pipeline.costs import measure_costs
from memfit.planning import plan
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate
from memfit.torch_private.allocations import peaks_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
aten = torch.ops.aten
_ERRORS = {"fp32": 2e-4, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}  # largest difference over largest value, against float64
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def cudnn() -> Library:
    found = library()
    assert found is not None, "PyTorch has a cuDNN, and it exports the interface"
    return found


@pytest.fixture
def refusals(cudnn: Library, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What cuDNN lists but refuses to run: PyTorch does it then, which would hide it."""
    found: list[str] = []
    plain = cudnn.run

    def watched(layer: Convolution, which: Direction, algorithm: Algorithm, *tensors: torch.Tensor) -> None:
        try:
            plain(layer, which, algorithm, *tensors)
        except CudnnError as error:
            found.append(f"{which} by {algorithm}: {error}")
            raise

    monkeypatch.setattr(cudnn, "run", watched)
    return found


@pytest.fixture(params=list(_ERRORS))
def precision(request: pytest.FixtureRequest) -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cudnn.allow_tf32 = before


LAYERS = {
    "plain": {},
    "stride": {"stride": 2},
    "dilation": {"dilation": 2},
    "groups": {"groups": 4},
    "depthwise": {"groups": 32, "outer": 32},
    "pointwise": {"kernel": 1},
    "transposed": {"transposed": True, "stride": 2, "kernel": 2},
}


def setting(
    dtype: torch.dtype,
    *,
    channels_last: bool,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    outer: int = 64,
    kernel: int = 3,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """(x, weight, bias, settings of aten.convolution)."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, 34, 30, device="cuda", dtype=dtype)
    shape = (32, outer // groups, kernel, kernel) if transposed else (outer, 32 // groups, kernel, kernel)
    weight = torch.randn(shape, device="cuda", dtype=dtype) / 16
    if channels_last:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    bias = torch.randn(outer, device="cuda", dtype=dtype)
    padding = 0 if kernel < 3 else dilation
    return x, weight, bias, ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups)


def layer_of(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, settings: tuple[Any, ...], channels_last: bool) -> Convolution:
    big, small = (y, x) if settings[3] else (x, y)
    return Convolution(
        dtype=x.dtype,
        channels_last=channels_last,
        input=tuple(big.shape),
        weight=tuple(weight.shape),
        output=tuple(small.shape),
        padding=tuple(settings[1]),
        stride=tuple(settings[0]),
        dilation=tuple(settings[2]),
        groups=settings[5],
        tf32=torch.backends.cudnn.allow_tf32,
        device=torch.cuda.current_device(),
    )


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_every_algorithm_is_as_exact_as_its_type(
    cudnn: Library, refusals: list[str], precision: str, name: str, channels_last: bool
) -> None:
    x, weight, bias, settings = setting(_DTYPES[precision], channels_last=channels_last, **LAYERS[name])
    wide = tuple(t.double() for t in (x, weight, bias))
    exact = aten.convolution.default(*wide, *settings)
    plain = aten.convolution.default(x, weight, bias, *settings)
    rest = ([bias.numel()], *settings, [True, True, True])
    gradient = torch.randn_like(plain)
    exact_back = aten.convolution_backward.default(gradient.double(), wide[0], wide[1], *rest)
    layer = layer_of(x, weight, plain, settings, channels_last)
    forward, back = (Direction.DATA, Direction.FORWARD) if settings[3] else (Direction.FORWARD, Direction.DATA)
    strides = tuple(strides_of(t.shape, channels_last=channels_last) for t in (x, weight))
    worst = _ERRORS[precision]
    ran = 0
    for algorithm in cudnn.algorithms(layer, forward):
        choice = Choice(
            convolution=layer, algorithms=((forward, algorithm),), strides=(strides_of(plain.shape, channels_last=channels_last),)
        )
        made = ConvolutionBy(choice)(x, weight, bias, *settings)
        assert error_of(made, exact) < worst, f"forward by {algorithm}"
        ran += 1
    assert ran, "cuDNN lists at least one algorithm"
    filters = cudnn.algorithms(layer, Direction.FILTER)
    datas = cudnn.algorithms(layer, back)
    for k in range(max(len(filters), len(datas))):
        pair = ((back, datas[min(k, len(datas) - 1)]), (Direction.FILTER, filters[min(k, len(filters) - 1)]))
        choice = Choice(convolution=layer, algorithms=pair, strides=strides)
        for found, wanted in zip(ConvolutionBackwardBy(choice)(gradient, x, weight, *rest), exact_back, strict=True):
            assert found is not None
            assert error_of(found, wanted) < worst, f"backward by {pair}"
    assert not refusals


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("which", list(Direction))
def test_the_workspace_is_the_one_that_was_said(cudnn: Library, which: Direction, channels_last: bool) -> None:
    x, weight, _, settings = setting(torch.float32, channels_last=channels_last)
    y = aten.convolution.default(x, weight, None, *settings)
    layer = layer_of(x, weight, y, settings, channels_last)
    first, second, result = {Direction.FORWARD: (x, weight, y), Direction.DATA: (weight, y, x), Direction.FILTER: (x, y, weight)}[which]
    refused = []
    for algorithm in cudnn.algorithms(layer, which):
        out = torch.empty_like(result)

        def once(algorithm: Any = algorithm, out: torch.Tensor = out) -> None:
            cudnn.run(layer, which, algorithm, first, second, out)

        try:
            once()
        except CudnnError as error:
            refused.append(str(error))
            continue
        _, peak = peaks_of(once, torch.device("cuda"))
        assert algorithm.workspace_bytes <= peak <= algorithm.workspace_bytes + 2 * 2**20
    assert not refused, f"listed but refused: {refused}"


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ["plain", "stride", "pointwise", "transposed"])
def test_parts_of_a_concatenation_are_read_where_they_lie(
    cudnn: Library, refusals: list[str], precision: str, name: str, channels_last: bool
) -> None:
    """Whatever is listed for operands with strides gives the right numbers; whether anything is listed is cuDNN's to say."""
    x, weight, bias, settings = setting(_DTYPES[precision], channels_last=channels_last, **LAYERS[name])
    plain = aten.convolution.default(x, weight, bias, *settings)
    rest = ([bias.numel()], *settings, [True, True, True])
    larger = torch.randn(plain.shape[0], 2 * plain.shape[1], *plain.shape[2:], device="cuda", dtype=x.dtype)
    larger = larger.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    gradient = larger[:, plain.shape[1] :]
    exact = aten.convolution_backward.default(gradient.double(), x.double(), weight.double(), *rest)
    part = {"input_strides" if settings[3] else "output_strides": tuple(gradient.stride())}
    layer = replace(layer_of(x, weight, plain, settings, channels_last), **part)
    back = Direction.FORWARD if settings[3] else Direction.DATA
    strides = tuple(strides_of(t.shape, channels_last=channels_last) for t in (x, weight))
    try:
        pairs = list(zip(cudnn.algorithms(layer, back), cudnn.algorithms(layer, Direction.FILTER), strict=False))
    except CudnnError as error:
        pytest.skip(f"not listed: {error}")
    for one, other in pairs:
        choice = Choice(convolution=layer, algorithms=((back, one), (Direction.FILTER, other)), strides=strides)
        for found, wanted in zip(ConvolutionBackwardBy(choice)(gradient, x, weight, *rest), exact, strict=True):
            assert found is not None
            assert error_of(found, wanted) < _ERRORS[precision], f"{one}, {other}"
    if not pairs or refusals:
        pytest.skip(f"{len(pairs)} listed, refused: {refusals}")


class Picture(nn.Module):
    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False),  # before a norm a bias has no gradient but rounding
            nn.BatchNorm2d(32),
            nn.ReLU(),
            *(layer for _ in range(depth) for layer in (nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 2, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 5, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))  # type: ignore[no-any-return]


def picture(*, channels_last: bool, depth: int = 0, batch: int = 16, size: int = 64) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Picture(depth).cuda(), torch.randn(batch, 3, size, size, device="cuda")
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, x, torch.randint(0, 5, (batch,), device="cuda")


def exact_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    wide = copy.deepcopy(model).double()
    nn.functional.cross_entropy(wide(x.double()), y).backward()
    return [p.grad for p in wide.parameters() if p.grad is not None]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("position", [0, -1])
def test_a_step_with_what_is_offered(channels_last: bool, position: int) -> None:
    model, x, y = picture(channels_last=channels_last)
    call = Call.flatten((x, y), {})
    plain = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    captured = offer_choices(plain, "inductor", Context(least_fraction=0.0))
    offered = [op for op in captured.graph.ops if op.variants]
    if not offered:
        pytest.skip("PyTorch's own algorithms take no workspace here")
    sequence = [(op.id, 0 if not op.variants else (len(op.variants) if position else 1)) for op in captured.graph.ops]
    schedule = schedule_from_ops(captured.graph, sequence)
    chosen = plan(captured.graph, planner="keep_all").require_plan()
    costs = uniform_costs(captured.graph)
    program = generate(captured, schedule)
    ready = Ready(captured=captured, costs=costs, plan=chosen, program=program, keep_all_peak_bytes=0, base_time_ns=0)
    run(Session(ready, (*model.parameters(), *model.buffers(), *call.tensors), trial=False, replan=lambda _: None)).backward()
    ours = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(ours, exact_gradients(model, x, y), strict=True):
        assert error_of(a, b) < 2e-2


def test_offers_are_timed_and_weighed() -> None:
    model, x, y = picture(channels_last=True)
    plain = capture(model, Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1)
    captured = offer_choices(plain, "inductor", Context(least_fraction=0.0))
    costs = measure_costs(captured)
    for op in captured.graph.ops:
        for variant in (v for v in range(1, len(op.forms)) if op.variants[v - 1].name.startswith("algorithm")):
            choice = captured.call(op.id, variant).target.args[0]  # type: ignore[union-attr]
            assert costs.time_ns(op.id, variant) > 0
            assert costs.workspace(op.id, variant) <= choice.workspace_bytes + sum(map(captured.graph.size_of, op.inputs)) + 2**21


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_a_fitted_model_has_the_plain_gradients(engine: str) -> None:
    """Large enough that cuBLAS's 32 MiB and the context matter little; as near to fp64 as the plain model, whose kernels round to TF32."""
    model, x, y = picture(channels_last=True, depth=4, batch=64, size=128)
    expected = exact_gradients(model, x, y)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    allowed = [max(2e-2, 2 * error_of(p.grad, b)) for p, b in zip(plain.parameters(), expected, strict=True) if p.grad is not None]
    del plain
    whole = memfit.fit(
        copy.deepcopy(model),
        (x,),
        budget="100GiB",
        loss_fn=nn.functional.cross_entropy,
        example_targets=(y,),
        engine=engine,
        time_limit_s=2,
    )
    whole(x, y).backward()
    budget = int(0.75 * whole.report().measured_peak_bytes) + 64 * 2**20
    del whole
    fitted = memfit.fit(
        model,
        (x,),
        budget=budget,
        loss_fn=nn.functional.cross_entropy,
        example_targets=(y,),
        engine=engine,
        allow=("recompute", "variants", "rounding"),
        time_limit_s=3,
    )
    for _ in range(2):
        model.zero_grad()
        fitted(x, y).backward()
    assert fitted.report().measured_peak_bytes <= budget
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b, most in zip(found, expected, allowed, strict=True):
        assert error_of(a, b) < most
