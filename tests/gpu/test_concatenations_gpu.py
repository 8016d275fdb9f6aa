"""Gradients of concatenations by parts on a CUDA device: a small UNet, the plain gradients, the promised bytes, one layout throughout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.training import assert_trains_inside
from tests.without_passes import leave_out
from torch import nn

import memfit
from memfit.core.errors import InfeasibleBudget
from memfit.kernels.concat_gradients import GradientOfPart
from memfit.kernels.layouts import order_strides
from memfit.torch_private.allocations import peaks_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class SmallUNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, width), self._block(width, 2 * width), self._block(2 * width, 4 * width)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)])
        self.merge = nn.ModuleList([self._block(2 * width, width), self._block(4 * width, 2 * width)])
        self.head = nn.Conv2d(width, 2, 1)

    def _block(self, inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        x = self.merge[1](torch.cat([second, self.up[1](x)], 1))
        x = self.merge[0](torch.cat([first, self.up[0](x)], 1))
        pixels: torch.Tensor = self.head(x)
        return pixels


def example(dtype: torch.dtype, layout: torch.memory_format) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = SmallUNet().cuda().to(dtype).to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(16, 3, 128, 128, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    return model, x, torch.randint(0, 2, (16, 128, 128), device="cuda")


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_gradients_and_bytes_of_a_tight_plan(layout: torch.memory_format, replay: bool) -> None:
    model, x, y = example(torch.float64, layout)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()
    kwargs: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "example_targets": (y,), "engine": "inductor", "time_limit_s": 5}
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch, "concat-gradients")
        with pytest.raises(InfeasibleBudget) as refusal:
            memfit.fit(copy.deepcopy(model), (x,), budget=2**20, **kwargs)
    assert refusal.value.minimum_bytes is not None
    budget = int(1.1 * refusal.value.minimum_bytes)
    fitted: Any = memfit.fit(model, (x,), budget=budget, replay=replay, **kwargs)
    ready = fitted._memfit.latest.ready
    made = [s.op for s in fitted.plan.schedule.computes if isinstance(ready.captured.calls[s.op].target, GradientOfPart)]
    assert len(made) == 4
    for op in made:  # dense (of fp64 cuDNN makes no channels last)
        sample = ready.captured.samples[ready.captured.graph.ops[op].outputs[0]]
        assert order_strides(sample.shape, sample.stride()) == sample.stride()
    assert_trains_inside(fitted, plain, (x, y), budget, replay=replay)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_parts_come_in_the_expected_layout_without_a_copy(layout: torch.memory_format, dtype: torch.dtype, width: int) -> None:
    """cuDNN gives a part's gradient with the strides that were promised: what is allocated beside it is small."""
    gradient = torch.randn(8, 64, 96, 96, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    weight = torch.randn(64, 128, width, width, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    whole = torch.empty(8, 128, 96, 96, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    geometry = ([1, 1], [width // 2, width // 2], [1, 1], False, [0, 0], 1)
    shape = (8, 64, 96, 96)
    strides = torch.empty(shape, device="meta").contiguous(memory_format=layout).stride()
    expected = torch.ops.aten.convolution_backward.default(gradient, whole, weight, None, *geometry, [True, False, False])[0][:, 64:]
    of_part = GradientOfPart(start=64, stop=128, shape=shape, strides=strides, stride=(1, 1), padding=(width // 2,) * 2, dilation=(1, 1))
    part = of_part(gradient, weight)
    assert part.stride() == strides
    assert (part - expected).abs().max() <= 2e-2 * expected.abs().max()
    made, peak = peaks_of(lambda: of_part(gradient, weight), gradient.device)
    if layout is torch.channels_last:  # in the other layout cuDNN's tensor core kernels may turn their operands round themselves
        assert peak - made < part.nbytes
