"""Gradients of max pools as one op: the same numbers as the traced step, in regions, with no buffer for them."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.captured_steps import assert_plain, fine, regions, run
from tests.training import needs_a_compiler
from tests.unit.passes.regions.test_regions import OneByOne
from torch import nn

from memfit.compilers.inductor.compiler import Inductor
from memfit.kernels.custom_ops import POOL_GRADIENT, max_pool_gradient
from memfit.passes.fx.max_pool_gradient import gather_pool_gradients
from memfit.passes.regions.piece import Region
from memfit.passes.regions.regions import gather_regions
from memfit.torch_private.allocations import peaks_of

torch.set_num_threads(1)


def network(pool: nn.Module, *, channels_last: bool = True, size: int = 18) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), pool, nn.Conv2d(8, 4, 1))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()
    x, y = torch.randn(4, 3, size, size, dtype=torch.float64), torch.randint(0, 5, (4,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, x, y


POOLS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d(3, 1, 1),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d(2, ceil_mode=True),
    nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
    nn.MaxPool2d(2, 3),
    nn.MaxPool2d(3, 2, ceil_mode=True),
    nn.MaxPool2d(3, 2),
    nn.MaxPool2d((3, 2), (2, 1)),
    nn.MaxPool2d(5, 2, 2),
    nn.MaxPool2d(5, 3),
    nn.MaxPool2d(5, 1, 2),
    nn.MaxPool2d((2, 5), (1, 4), (1, 2)),
]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_plain_model_s_gradients(pool: nn.Module, channels_last: bool) -> None:
    model, x, y = network(pool, channels_last=channels_last)
    ops = fine(copy.deepcopy(model), x, y, OneByOne()).calls
    assert [c.target for c in ops].count(POOL_GRADIENT) == 1
    assert not any(c.target is torch.ops.aten.scatter_add.default for c in ops)
    found, _ = run(regions(copy.deepcopy(model), x, y, OneByOne()), model, x, y)
    assert_plain(found, model, x, y)


@needs_a_compiler
@pytest.mark.parametrize(("number", "pool"), list(enumerate(POOLS)), ids=str)
def test_compiled(number: int, pool: nn.Module) -> None:
    model, x, y = network(pool, size=17 + number % 2)
    found, _ = run(regions(copy.deepcopy(model), x, y, Inductor()), model, x, y)
    assert_plain(found, model, x, y)


@needs_a_compiler
def test_compiled_in_half_precision() -> None:
    """Windows' gradients are added up in single precision, and rounded once."""
    kernel, stride, padding, plane = [3, 3], [1, 1], [1, 1], [12, 12]
    change = torch.randn(2, 4, 12, 12).bfloat16()
    offsets = torch.randint(0, 9, (2, 4, 12, 12), dtype=torch.int8)
    offsets[..., 0, :] = offsets[..., -1, :] = offsets[..., :, 0] = offsets[..., :, -1] = 4  # of windows at the border the middle
    graph = torch.fx.Graph()
    made = graph.call_function(POOL_GRADIENT, (graph.placeholder("change"), graph.placeholder("offsets"), kernel, stride, padding, plane))
    graph.output((made,))
    run_it = Inductor().compile(torch.fx.GraphModule(nn.Module(), graph), [change, offsets])
    (found,) = run_it([change, offsets])
    exact = max_pool_gradient(change.double(), offsets, kernel, stride, padding, plane)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@needs_a_compiler
def test_inductor_has_no_buffer_for_it() -> None:
    model, x, y = network(nn.MaxPool2d(3, 2, 1))
    captured = regions(copy.deepcopy(model), x, y, Inductor())
    step = fine(copy.deepcopy(model), x, y, Inductor())
    found, inputs = run(captured, model, x, y)
    assert_plain(found, model, x, y)
    activation = next(s.nbytes for c in step.calls if c.target is POOL_GRADIENT for t in c.outputs if (s := step.samples[t]) is not None)  # type: ignore[index]
    last = max(op for op, args in inputs.items() if any(getattr(a, "dtype", None) is torch.int8 for a in args))
    target, args = captured.calls[last].target, inputs[last]
    assert isinstance(target, Region)
    left, peak = peaks_of(lambda: target(*args), torch.device("cpu"))
    assert peak - left < activation / 10


@pytest.mark.parametrize("shape", [(4, 12, 12), (2, 4, 12, 12)])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_op_itself(pool: nn.MaxPool2d, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, positions = nn.functional.max_pool2d_with_indices(x, pool.kernel_size, pool.stride, pool.padding, ceil_mode=pool.ceil_mode)
    change = torch.randn_like(y)
    (plain,) = torch.autograd.grad(y, x, change)
    kernel, stride, padding = ([v, v] if isinstance(v, int) else [*v] for v in (pool.kernel_size, pool.stride, pool.padding))
    rows, columns = positions // 12, positions % 12
    first_row, first_column = (torch.arange(n) * s - p for n, s, p in zip(y.shape[-2:], stride, padding, strict=True))
    offsets = ((rows - first_row[:, None]) * kernel[1] + columns - first_column).to(torch.int8)
    torch.testing.assert_close(max_pool_gradient(change, offsets, kernel, stride, padding, [12, 12]), plain)
    torch.library.opcheck(
        POOL_GRADIENT, (change, offsets, kernel, stride, padding, [12, 12]), test_utils=("test_schema", "test_faketensor")
    )


def test_dilated_pools_are_left_alone() -> None:
    model, x, y = network(nn.MaxPool2d(3, 2, dilation=2))
    captured = fine(copy.deepcopy(model), x, y, OneByOne())
    assert not any(c.target is POOL_GRADIENT for c in captured.calls)
    found, _ = run(gather_regions(captured, OneByOne()), model, x, y)
    assert_plain(found, model, x, y)


def test_pools_of_volumes_and_of_lines() -> None:
    torch.manual_seed(0)
    for convolution, pool, size in ((nn.Conv3d, nn.MaxPool3d(2), (6, 6, 6)), (nn.Conv1d, nn.MaxPool1d(3, 2), (12,))):
        model = nn.Sequential(convolution(2, 4, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(5)).double()
        x, y = torch.randn(3, 2, *size, dtype=torch.float64), torch.randint(0, 5, (3,))
        model(x)
        found, _ = run(regions(copy.deepcopy(model), x, y, OneByOne()), model, x, y)
        assert_plain(found, model, x, y)


def test_other_scatters_are_left_alone() -> None:
    graph = torch.fx.Graph()
    positions, values = graph.placeholder("positions"), graph.placeholder("values")
    zeros = graph.call_function(torch.ops.aten.full.default, ([4, 9], 0), {"dtype": torch.float64})
    graph.output((graph.call_function(torch.ops.aten.scatter_add.default, (zeros, 1, positions, values)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert gather_pool_gradients(module) == 0
