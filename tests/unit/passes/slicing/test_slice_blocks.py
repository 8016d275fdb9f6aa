"""Blocks of a step in slices of the batch: where they are found and where not, what is left whole, sizes of slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.costs import uniform_costs
from memfit.core.graph import Graph
from memfit.passes.slicing.analysis import analyse
from memfit.passes.slicing.find_blocks import find_blocks
from memfit.passes.slicing.parts import Block
from memfit.passes.slicing.slice_blocks import slice_blocks, slice_size
from memfit.passes.slicing.sliced_call import Sliced
from memfit.passes.slicing.states import SUMMED, WHOLE, Split
from memfit.pipeline.capture import capture
from memfit.planning import plan
from memfit.profile.roofline import roofline


def vgg(*, norm: Callable[[int], nn.Module] | None = None, drop: float = 0.0, widths: tuple[int, ...] = (8, 16, 32)) -> nn.Module:
    layers: list[nn.Module] = [nn.Dropout(drop)] if drop else []
    inner = 3
    for width in widths:
        for _ in range(2):
            layers += [nn.Conv2d(inner, width, 3, padding=1), *([norm(width)] if norm else []), nn.ReLU(inplace=True)]
            inner = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 5))


def step(model: nn.Module, *, batch: int = 6, compiled: bool = True, size: int = 32, loss: bool = True) -> Captured:
    x, y = torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
    compiler = Inductor() if compiled else None
    if not loss:
        return capture(model, Call.flatten((x,), {}), compiler=compiler)
    return capture(model, Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=compiler)


def blocks_of(captured: Captured, *, lean: bool = False) -> list[Block]:
    batch = analyse(captured)
    return [] if batch is None else list(find_blocks(batch, lean=lean))


def bytes_of(graph: Graph, tensors: tuple[int, ...]) -> int:
    return sum(map(graph.size_of, tensors))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("loss", [True, False])
def test_a_block_ends_after_each_pool_and_only_the_pooled_values_exist_whole(compiled: bool, loss: bool) -> None:
    captured = step(vgg(), compiled=compiled, loss=loss)
    found = blocks_of(captured, lean=True)
    assert len(found) == 3
    for number, block in enumerate(found[:2]):
        (pooled,) = block.forward.outputs
        sample = captured.samples[pooled]
        assert sample is not None
        assert tuple(sample.shape) == (6, (8, 16)[number], (16, 8)[number], (16, 8)[number])
        assert block.backward is not None
        gradients = [captured.samples[t].shape for t in block.backward.outputs]  # type: ignore[union-attr]
        assert len(gradients) == 4 * (number + 1)  # a weight and a bias for each of two convolutions, and nothing of the size of the batch
        assert sum(t in captured.convention.tangents or captured.samples[t] is None for t in block.backward.inputs) == 0
        incoming = [t for t in block.backward.inputs if t not in captured.graph.sources and captured.samples[t].shape == sample.shape]  # type: ignore[union-attr]
        assert len(incoming) == 1


def test_what_pools_made_is_kept_and_their_convolutions_run_once() -> None:
    captured = step(vgg())
    calls = captured.calls
    for number, (block, lean) in enumerate(zip(blocks_of(captured), blocks_of(captured, lean=True), strict=True), 1):
        assert block.backward is not None
        assert lean.backward is not None
        again, all_again = (sum(calls[op].target is torch.ops.aten.convolution.default for op in b.backward.ops) for b in (block, lean))  # type: ignore[union-attr]
        assert (again, all_again) == (number, 2 * number)  # a last convolution gives what only the pool reads
        kept = [captured.samples[t] for t in block.forward.outputs]
        assert [(s.dtype, s.shape[-1]) for s in kept if s is not None and s.dtype is torch.int8] == [
            (torch.int8, 16 // 2**k) for k in range(number)
        ]
        assert set(block.forward.outputs) >= set(lean.forward.outputs)
        assert bytes_of(captured.graph, block.forward.outputs) < 3 * bytes_of(
            captured.graph, blocks_of(captured, lean=True)[0].forward.outputs
        )


def test_nothing_is_kept_that_is_made_again_anyway() -> None:
    for block, lean in zip(*(blocks_of(step(vgg(), compiled=False), lean=lean) for lean in (False, True)), strict=True):
        assert block == lean  # eager pools read their input in backward: it is made again, and everything before it


@pytest.mark.parametrize("compiled", [True, False])
def test_statistics_over_the_batch_and_random_numbers_end_blocks(compiled: bool) -> None:
    assert blocks_of(step(vgg(norm=nn.BatchNorm2d), compiled=compiled)) == []
    assert blocks_of(step(vgg(drop=0.5), compiled=compiled)) == []


def test_statistics_of_one_sample_and_constant_ones_do_not() -> None:
    assert len(blocks_of(step(vgg(norm=lambda width: nn.GroupNorm(2, width)), compiled=False))) == 3
    for compiled in (True, False):
        assert len(blocks_of(step(vgg(norm=nn.BatchNorm2d).eval(), compiled=compiled))) == 3


def test_no_block_where_width_does_not_fall_or_there_is_no_batch() -> None:
    pooled = (6, 8, 8, 8)
    growing = step(vgg(widths=(8, 32)), size=16)  # as wide after the first pool as before it
    assert pooled in [tuple(s.shape) for s in growing.samples if s is not None]
    assert all(tuple(growing.samples[t].shape) != pooled for b in blocks_of(growing, lean=True) for t in b.forward.outputs)  # type: ignore[union-attr]
    assert blocks_of(step(vgg(), batch=1)) == []

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = torch.relu(self.first(x))
            narrow = self.second(nn.functional.max_pool2d(wide, 2))
            return (wide + nn.functional.interpolate(narrow, scale_factor=2)).mean((2, 3))

    assert blocks_of(step(Skips())) == []  # what is wide is read at the end again


def test_weights_cast_for_each_step_do_not_count_as_width() -> None:
    model = nn.Sequential(
        *list(vgg().children())[:-2], nn.Flatten(), nn.Linear(32, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Linear(4096, 5)
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = blocks_of(step(model), lean=True)
    assert len(found) >= 3


def test_what_is_frozen_has_no_gradients_in_the_block() -> None:
    model = vgg()
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    block = blocks_of(step(model))[0]
    assert block.backward is not None
    assert len(block.backward.outputs) == 2
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    assert blocks_of(step(model))[0].backward is None


def test_an_input_that_requires_grad_has_its_gradient_whole() -> None:
    x, y = torch.randn(6, 3, 32, 32, requires_grad=True), torch.zeros(6, dtype=torch.long)
    captured = capture(vgg(), Call.flatten((x, y), {}), loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=Inductor())
    block = blocks_of(captured)[0]
    assert block.backward is not None
    shapes = [captured.samples[t].shape for t in block.backward.outputs]  # type: ignore[union-attr]
    assert x.shape in shapes


def test_a_weight_used_inside_and_outside_adds_up() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.max_pool2d(torch.relu(self.again(torch.relu(self.first(x)))), 2)
            x = nn.functional.max_pool2d(torch.relu(self.again(x)), 2)
            return self.head(self.again(x).mean((2, 3)))

    block = blocks_of(step(Tied()))[0]
    assert block.backward is not None
    assert all(op not in block.left for op in block.forward.ops if step(Tied()).calls[op].target is torch.ops.aten.convolution.default)


def test_states_of_a_step() -> None:
    captured = step(vgg())
    batch = analyse(captured)
    assert batch is not None
    convention = captured.convention
    assert batch.states[convention.sources[convention.num_parameters]] == Split(0, 1)  # the images
    assert all(batch.states[t] is WHOLE for t in convention.sources[: convention.num_parameters])
    makers = {t: op.id for op in captured.graph.ops for t in op.outputs}
    for call in captured.calls:
        if call.role is Role.ACCUMULATE:
            maker = captured.graph.ops[makers[call.args[0].tensor]]
            value = maker.inputs[0] if captured.graph.is_view(maker, call.args[0].tensor) else call.args[0].tensor
            assert batch.states[value] is SUMMED


@pytest.mark.parametrize(
    ("batch", "least", "expected"),
    [(176, 8, 22), (64, 8, 8), (24, 1, 3), (6, 1, 1), (7, 1, 1), (13, 1, 2), (100, 1, 10), (97, 1, 13), (17, 8, 8), (9, 8, 5), (2, 1, 1)],
)
def test_sizes_of_slices(batch: int, least: int, expected: int) -> None:
    assert slice_size(batch, num_slices=8, least=least) == expected


def test_offers_go_below_what_any_order_of_whole_ops_needs() -> None:
    plain = step(vgg(), batch=24, compiled=False)
    minima = [plan(c.graph, uniform_costs(c.graph), 0, time_limit_s=1).lower_bound_bytes for c in (plain, *slice_blocks(plain, None))]
    assert len(minima) == 4
    assert minima == sorted(minima, reverse=True)
    assert minima[-1] < minima[0] / 3


def test_estimates_count_what_happens_inside() -> None:
    plain = step(vgg(), batch=24, compiled=False)
    (sliced, *_) = slice_blocks(plain, None)
    before, after = roofline(plain, "h200"), roofline(sliced, "h200")
    targets = {op.name.split()[0]: op.id for op in sliced.graph.ops if isinstance(sliced.calls[op.id].target, Sliced)}
    assert set(targets) == {"memfit.sliced_forward", "memfit.sliced_backward"}
    assert sum(after.op_time_ns) > sum(before.op_time_ns)  # forward of the block twice, and more launches
    largest = max(s.size_bytes for s in plain.graph.storages)
    assert 0 < after.workspace_bytes[targets["memfit.sliced_backward"]] < largest


def test_equal_code_is_written_once() -> None:
    captured = step(vgg(), batch=7)
    (first, *_), (again, *_) = (list(slice_blocks(captured, Inductor(), num_slices=3)) for _ in range(2))
    names: list[list[Any]] = [[op.name for op in c.graph.ops if "sliced" in op.name] for c in (first, again)]
    assert names[0] == names[1]
    target = next(c.target for c in first.calls if isinstance(c.target, Sliced))
    assert [piece.num_ops > 0 for piece in target.pieces] == [True, True]  # slices of three, and a last one of one
    assert not target.is_compiled
