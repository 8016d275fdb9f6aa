"""Everything a captured step can run says what it takes, whichever pass put it there."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.unit.passes.variants.test_choices import Picture, Words
from torch import nn

import memfit
from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.kernels.chunked_loss import ChunkedLoss, ChunkedLossBackward
from memfit.kernels.compiler import PlainOps
from memfit.kernels.convolution_algorithms import ConvolutionBackwardBy, ConvolutionBy
from memfit.kernels.fused_attention import AttentionBackwardBy, AttentionBy
from memfit.kernels.fused_loss import FusedLoss
from memfit.kernels.implementation import Implementation, Work, count_bytes, work_of
from memfit.kernels.norms import CudnnBatchNorm, CudnnBatchNormBackward
from memfit.passes.interface import Context
from memfit.passes.regions.regions import gather_regions
from memfit.passes.run import offer_choices
from memfit.passes.slicing.slice_blocks import slice_blocks
from memfit.passes.step.chunked_loss import chunk_loss
from memfit.passes.step.concat_gradients import split_concat_gradients
from memfit.passes.step.fused_loss import fuse_loss
from memfit.passes.variants.convolution_slices import slice_convolutions
from memfit.pipeline.capture import capture
from memfit.profile.roofline import roofline
from memfit.torch_private.allocations import peaks_of
from memfit.torch_private.tensors import is_op

aten = torch.ops.aten
cross_entropy = nn.functional.cross_entropy


class Attends(nn.Module):
    """Fused attention, and attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.make(x).chunk(3, -1))
        written = torch.softmax(q @ k.transpose(-2, -1) / 2, -1) @ v
        fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head((written + fused).transpose(1, 2).flatten(2).mean(1))


class Skips(nn.Module):
    """A concatenation that a convolution reads."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.both = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.down(x))
        return self.both(torch.cat([skip, torch.relu(self.up(skip))], 1)).mean((2, 3))


def pool() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 3, 16, 16), torch.randint(0, 5, (16,))


ON_A_GPU = {AttentionBackwardBy, AttentionBy, ConvolutionBackwardBy, ConvolutionBy, CudnnBatchNorm, CudnnBatchNormBackward}
TOKENS = torch.randint(0, 300, (4, 12))
MODELS = {
    "picture": (Picture, (torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,)))),
    "words": (Words, (TOKENS, TOKENS.flatten())),
    "attends": (Attends, (torch.randn(4, 16, 8), torch.randint(0, 5, (4,)))),
    "skips": (Skips, images()),
    "pool": (pool, images()),
}


def eager_forms(plain: Captured) -> Iterator[Captured]:
    wholes = (plain, chunk_loss(plain, least_fraction=0.0), split_concat_gradients(plain, least_fraction=0.0))
    blocks = (form for lean in (False, True) for form in slice_blocks(plain, None, lean=lean))
    for form in (*wholes, *blocks, slice_convolutions(plain, least_fraction=0.0)):
        if form is not None:
            yield offer_choices(form, "eager", Context(least_fraction=0.0))


def compiled_forms(fine: Captured) -> Iterator[Captured]:
    wholes = (fine, fuse_loss(fine, Inductor(), least_fraction=0.0), split_concat_gradients(fine, Inductor(), least_fraction=0.0))
    for form in (*wholes, *slice_blocks(fine, Inductor()), slice_convolutions(fine, least_fraction=0.0)):
        if form is not None:
            yield gather_regions(offer_choices(form, "inductor", Context(least_fraction=0.0)), Inductor())


def walk() -> Iterator[Captured]:
    for make, (x, y) in MODELS.values():
        for compiler in (None, Inductor()):
            plain = capture(make(), Call.flatten((x, y), {}), loss_fn=cross_entropy, num_targets=1, compiler=compiler)
            yield plain
            yield from eager_forms(plain) if compiler is None else compiled_forms(plain)


def test_every_target_of_every_form_says_its_work() -> None:
    seen = set[type]()
    for captured in walk():
        for call in (*captured.calls, *(c for calls in captured.variant_calls for c in calls)):
            if call.role is Role.CALL:
                assert isinstance(call.target, Implementation) or is_op(call.target), call.target
                assert isinstance(captured.work(call), Work)
                seen |= {type(call.target)} if isinstance(call.target, Implementation) else set()
        assert len(roofline(captured, "h200").op_time_ns) == len(captured.graph.ops)
    assert seen == every_kind() - ON_A_GPU


def test_every_implementation_has_work_of_its_own() -> None:
    for kind in every_kind():
        assert {"work", "__call__"} <= vars(kind).keys(), kind


def every_kind() -> set[type]:
    for module in pkgutil.walk_packages(memfit.__path__, "memfit."):
        if module.name.startswith(("memfit.kernels.", "memfit.passes.")):
            importlib.import_module(module.name)
    kinds = (k for k in Implementation.__subclasses__() if k.__module__.startswith("memfit."))
    return {getattr(sys.modules[k.__module__], k.__name__) for k in kinds}  # a class with slots was another one before


def price(work: Work) -> tuple[float, int]:
    parts = (work, *work.then)
    return sum(part.flops for part in parts), sum(part.moved_bytes for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_loss_takes_what_its_products_and_passes_take(dtype: torch.dtype) -> None:
    """It was priced as one pass over its inputs and outputs: 7.9 µs on an H200 where the loss in chunks takes 638."""
    hidden, weight = torch.empty(8192, 768, dtype=dtype, device="meta"), torch.empty(768, 50_257, dtype=dtype, device="meta")
    target, loss = torch.empty(8192, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    gradients = (torch.empty(50_257, 768, dtype=dtype, device="meta"), torch.empty_like(hidden))
    fused = FusedLoss(PlainOps(), reduction=1, ignore=-100, dtype=torch.float32).work((loss, loss, *gradients), hidden, weight, target)
    settings = {"num_chunks": 8, "reduction": 1, "ignore": -100, "dtype": torch.float32}
    forward = ChunkedLoss(**settings).work((loss, loss), hidden, weight, target)  # type: ignore[arg-type]
    backward = ChunkedLossBackward(**settings).work(gradients, loss, hidden, weight, target, loss)  # type: ignore[arg-type]
    product = 2.0 * 8192 * 768 * 50_257
    assert [price(w)[0] / product for w in (forward, backward, fused)] == [1, 3, 3]
    chunked_bytes = price(forward)[1] + price(backward)[1]
    assert 5 * dtype.itemsize * 8192 * 50_257 < price(fused)[1] < chunked_bytes
    assert fused.workspace_bytes >= 2 * dtype.itemsize * 1024 * 50_257


@pytest.mark.parametrize("width", [296, 300])
def test_the_workspace_of_a_fused_loss_covers_what_it_holds(width: int) -> None:
    hidden, weight, target = torch.randn(64, 512), torch.randn(512, width), torch.randint(0, width, (64,))
    fused = FusedLoss(PlainOps(), reduction=1, ignore=-100, dtype=torch.float32)
    made = fused(hidden, weight, target)
    held, peak = peaks_of(lambda: fused(hidden, weight, target), hidden.device)
    chunk_bytes = 4 * 8 * width  # ops that are not compiled hold a few more matrices of a chunk
    assert abs(peak - held - fused.work(made, hidden, weight, target).workspace_bytes) < 8 * chunk_bytes


def test_a_language_model_costs_as_much_with_its_loss_fused_as_in_chunks() -> None:
    call = Call.flatten((TOKENS, TOKENS.flatten()), {})
    model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 5000, bias=False), nn.Flatten(0, 1))
    fine = capture(model, call, loss_fn=cross_entropy, num_targets=1, compiler=Inductor())
    fused, chunked = fuse_loss(fine, Inductor()), chunk_loss(fine)
    assert fused is not None
    assert chunked is not None
    times = [
        sum(
            ns
            for op, ns in zip(form.graph.ops, roofline(form, "cpu").op_time_ns, strict=True)
            if op.name.startswith(("memfit.loss", "memfit.chunked"))
        )
        for form in (fused, chunked)
    ]
    assert 0.4 < times[0] / times[1] < 1


def test_work_counts_every_tensor_once() -> None:
    x, y = torch.empty(4, 8, device="meta"), torch.empty(8, 2, dtype=torch.bfloat16, device="meta")
    assert count_bytes((x, [x, y], {"z": y, "n": 3})) == 4 * 32 + 2 * 16
    assert work_of(aten.relu.default, x, (x,), {}) == Work(moved_bytes=8 * 32)
    product = work_of(aten.mm.default, torch.empty(4, 2, device="meta"), (x, y), {})
    assert (product.flops, product.half) == (2 * 4 * 8 * 2, True)


def test_attention_on_the_cpu_is_counted_as_any_other() -> None:
    q = torch.empty(2, 3, 16, 4, device="meta")
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert work_of(flash, (q, q), (q, q, q, 0.0, True), {}).flops == 4 * q.numel() * 16
