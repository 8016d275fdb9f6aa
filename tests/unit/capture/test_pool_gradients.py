"""Gradients of max pools by gathering: the same numbers as by scattering, in regions, with no buffer for them."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from tests.unit.capture.test_regions import OneByOne
from torch import nn
from torch.utils._pytree import tree_map

from memfit.capture.captured import Captured, Ref, Role
from memfit.capture.inputs import Call
from memfit.capture.pool_gradients import gathered, scattered
from memfit.capture.region import Region
from memfit.capture.regions import with_regions
from memfit.capture.step import capture
from memfit.execute.inductor import Inductor
from memfit.profile.allocations import peaks_of

torch.set_num_threads(1)


def network(pool: nn.Module, *, channels_last: bool = True) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), pool, nn.Conv2d(8, 4, 1))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()
    x, y = torch.randn(4, 3, 18, 18, dtype=torch.float64), torch.randint(0, 5, (4,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, x, y


def regions(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compiler: Inductor) -> Captured:
    fine = capture(model, Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=compiler)
    return with_regions(fine, compiler)


def run(captured: Captured, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[dict[int, torch.Tensor], dict[int, Any]]:
    """Gradients by position of their source, every op once, gathered where that is offered; and the inputs of those that were."""
    values: dict[int, torch.Tensor] = dict(zip(captured.convention.sources, (*model.parameters(), *model.buffers(), x, y), strict=True))
    found, inputs = {}, {}
    with torch.no_grad():
        for op, call in zip(captured.graph.ops, captured.calls, strict=True):
            if call.role is Role.BACKWARD_BEGINS:
                values.update((t, torch.ones((), dtype=x.dtype, device=x.device)) for t in op.outputs)
            elif call.role is Role.ACCUMULATE:
                found[call.index] = values[call.args[0].tensor]
            elif not all(t in values for t in op.outputs):
                form = next((k for k, v in enumerate(op.variants, 1) if v.name.startswith("gathered")), 0)
                args, kwargs = tree_map(lambda v: values[v.tensor] if isinstance(v, Ref) else v, (call.args, dict(call.kwargs)))
                if form:
                    inputs[op.id] = args
                made = captured.call(op.id, form).target(*args, **kwargs)  # type: ignore[misc]
                outputs = made if call.unpack else (made,)
                values.update((t, v) for t, v in zip(call.outputs, outputs, strict=True) if t is not None)
    return found, inputs


POOLS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d(3, 1, 1),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d(2, ceil_mode=True),
    nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
    nn.MaxPool2d(2, 3),
]
TRACED_AS_GATHERED = torch.__version__ < "2.12"
LEFT_ALONE = [nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d((3, 2), (2, 1))]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_plain_model_s_gradients(pool: nn.Module, channels_last: bool) -> None:
    model, x, y = network(pool, channels_last=channels_last)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    found, inputs = run(regions(model, x, y, OneByOne()), model, x, y)
    assert inputs  # it was offered
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor on the CPU needs a C++ compiler")
def test_inductor_has_no_buffer_for_it() -> None:
    model, x, y = network(nn.MaxPool2d(3, 2, 1))
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    captured = regions(model, x, y, Inductor())
    found, inputs = run(captured, model, x, y)
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-10, atol=1e-12)
    ((op, args),) = inputs.items()
    activation = max(t.nbytes for t in args)
    targets = [c.target for c in (captured.calls[op], *captured.variant_calls[op]) if isinstance(c.target, Region)]
    workspaces = []
    for target in targets:
        target(*args)  # compiles
        left, peak = peaks_of(lambda target=target: target(*args), torch.device("cpu"))  # type: ignore[misc]
        workspaces.append(peak - left)
    assert workspaces[0] >= activation
    assert min(workspaces) < activation / 10


@pytest.mark.parametrize("pool", LEFT_ALONE, ids=str)
def test_windows_that_overlap_at_the_border_are_left_alone(pool: nn.Module) -> None:
    """Gathered in a reduction on a GPU their gradients were wrong."""
    model, x, y = network(pool)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    captured = regions(model, x, y, OneByOne())
    assert not any(v.name.startswith("gathered") for op in captured.graph.ops for v in op.variants)
    found, _ = run(captured, model, x, y)
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("pool", LEFT_ALONE, ids=str)
def test_scattered_by_us(pool: nn.Module, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision on a GPU PyTorch's own way is wrong for these."""
    moved: list[int] = []
    monkeypatch.setattr("memfit.capture.step.scattered", lambda module: moved.append(scattered(module, always=True)))
    model, x, y = network(pool, channels_last=channels_last)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    captured = regions(model, x, y, OneByOne())
    assert moved == [int(TRACED_AS_GATHERED)]
    found, _ = run(captured, model, x, y)
    for position, parameter in enumerate(plain.parameters()):
        assert parameter.grad is not None
        torch.testing.assert_close(found[position], parameter.grad, rtol=1e-10, atol=1e-12)


def test_other_scatters_are_left_alone() -> None:
    graph = torch.fx.Graph()
    positions, values = graph.placeholder("positions"), graph.placeholder("values")
    zeros = graph.call_function(torch.ops.aten.full.default, ([4, 9], 0), {"dtype": torch.float64})
    graph.output((graph.call_function(torch.ops.aten.scatter_add.default, (zeros, 1, positions, values)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert gathered(module) == 0
