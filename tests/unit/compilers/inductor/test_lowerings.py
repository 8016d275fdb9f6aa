"""What Inductor is told about memory: which values it writes out, and in which layout a sum lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import needs_a_compiler
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from memfit.compilers.inductor.code_writers import GraphText
from memfit.compilers.inductor.compiler import Inductor
from memfit.torch_private.allocations import peaks_of

torch.set_num_threads(1)
aten = torch.ops.aten


def compiled(fn: Callable[..., Any], *inputs: torch.Tensor) -> Callable[[], Any]:
    module = make_fx(fn, decomposition_table=dict(Inductor().decompositions))(*inputs)
    run = Inductor().compile(module, list(inputs))
    return lambda: run(list(inputs))


def workspace(run: Callable[[], Any]) -> int:
    run()
    left, peak = peaks_of(run, torch.device("cpu"))
    return peak - left


def channels() -> tuple[torch.Tensor, ...]:
    """An activation, the gradient of what a norm and its activation made of it, and the norm's statistics and weights."""
    torch.manual_seed(0)
    x, change = (torch.randn(8, 16, 20, 20).contiguous(memory_format=torch.channels_last) for _ in range(2))
    return x, change, *(torch.rand(1, 16, 1, 1) + 0.5 for _ in range(4))


def clipped_norm_statistics(x: torch.Tensor, change: torch.Tensor, *per_channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a gradient, masked as it is traced: the normalised value is read twice for the mask, the masked gradient by one sum after another."""
    mean, variance, weight, bias = per_channel
    normalised = (x - mean) * (variance + 1e-5).rsqrt() * weight + bias
    masked = torch.where((normalised <= 0) | (normalised >= 6), 0.0, change)
    total = masked.sum((0, 2, 3), keepdim=True)
    return total, (masked - total / 3200).square().sum((0, 2, 3))


@needs_a_compiler
def test_a_value_of_two_activations_is_not_written_out() -> None:
    given = channels()
    run = compiled(clipped_norm_statistics, *given)
    assert workspace(run) < given[0].nbytes / 4
    for found, wanted in zip(run(), clipped_norm_statistics(*given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@needs_a_compiler
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (2, 2, 0)])
def test_what_a_pool_reads_is_not_written_out(kernel: int, stride: int, padding: int) -> None:
    x, _, mean, variance, *_ = channels()

    def pooled(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.max_pool2d(((x - mean) * variance).relu(), kernel, stride, padding),)

    run = compiled(pooled, x, mean, variance)
    assert workspace(run) < x.nbytes / 4
    torch.testing.assert_close(run()[0], pooled(x, mean, variance)[0])


def traced_sum(a: torch.Tensor, b: torch.Tensor, **scaled: Any) -> torch.Tensor:
    module = make_fx(lambda a, b: torch.add(a, b, **scaled), decomposition_table=dict(Inductor().decompositions), tracing_mode="fake")(a, b)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    found: torch.Tensor = node.meta["val"]
    torch.testing.assert_close(module(a, b), torch.add(a, b, **scaled))
    return found


def test_a_sum_lies_as_its_contiguous_term() -> None:
    transposed, contiguous = torch.randn(5, 4, 8).transpose(0, 1), torch.randn(4, 5, 8)
    assert traced_sum(transposed, contiguous).is_contiguous()
    assert traced_sum(contiguous, transposed).is_contiguous()
    assert traced_sum(transposed.bfloat16(), contiguous).is_contiguous()


def test_sums_that_are_left_as_they_are() -> None:
    transposed, contiguous = torch.randn(5, 4, 8).transpose(0, 1), torch.randn(4, 5, 8)
    assert not traced_sum(transposed, contiguous, alpha=2).is_contiguous()
    assert not traced_sum(transposed, contiguous.transpose(1, 2).contiguous().transpose(1, 2)).is_contiguous()
    images = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    assert traced_sum(images, torch.randn(2, 8, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    volumes = torch.randn(2, 8, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    assert traced_sum(volumes, torch.randn(2, 8, 4, 4, 4)).is_contiguous(memory_format=torch.channels_last_3d)


def test_a_pool_s_gradient_can_be_sent_to_a_writer() -> None:
    graph = torch.fx.Graph()
    sizes = ([2, 2], [2, 2], [0, 0], [4, 4])
    made = graph.call_function(
        torch.ops.memfit.max_pool_gradient.default, (graph.placeholder("change"), graph.placeholder("offsets"), *sizes)
    )
    graph.output((made,))
    samples = [torch.randn(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int8)]
    text = GraphText.of(torch.fx.GraphModule(nn.Module(), graph), samples)
    assert text is not None
    module, _ = text.read()
    (found,) = module(*samples)
    assert found.flatten().count_nonzero() == 4
    torch.testing.assert_close(found.sum(), samples[0].sum())
