"""Every other implementation gives the gradients of the plain model, alone and in a whole step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.core.costs import uniform_costs
from memfit.core.errors import IllegalSchedule
from memfit.core.graph import Op
from memfit.core.simulate import simulate
from memfit.kernels.bits import PackSigns, ReluGradientFromBits, count_packed_bytes
from memfit.kernels.compiler import PlainOps
from memfit.kernels.sliced_convolution import ConvolutionBackwardInSlices, ConvolutionInSlices
from memfit.passes.interface import Context
from memfit.passes.run import offer_choices
from memfit.passes.step.chunked_loss import chunk_loss
from memfit.passes.step.fused_loss import fuse_loss
from memfit.passes.variants.convolution_slices import slice_convolutions
from memfit.pipeline.capture import capture
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task
from memfit.planning import plan
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.runtime.autograd_step import Ready, Session, run
from memfit.runtime.codegen import generate

aten = torch.ops.aten


class Picture(nn.Module):
    """Every op that has a variant of its own, in one small network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.layer = nn.LayerNorm(8 * 16)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.norm(self.first(x))), 2)
        x = self.drop(nn.functional.gelu(self.second(x)))
        return self.head(self.layer(x.flatten(1)))


def setting() -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    call = Call.flatten((torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))), {})
    return Picture(), call


def gradients_of(captured: Captured, schedule: Any, model: nn.Module, call: Call) -> list[torch.Tensor]:
    model.zero_grad()
    chosen = plan(captured.graph, planner="keep_all").require_plan()
    program = generate(captured, schedule)
    ready = Ready(
        captured=captured, costs=uniform_costs(captured.graph), plan=chosen, program=program, keep_all_peak_bytes=0, base_time_ns=0
    )
    torch.manual_seed(7)
    run(Session(ready, (*model.parameters(), *model.buffers(), *call.tensors), trial=False, replan=lambda _: None)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain_gradients(model: nn.Module, call: Call, loss_fn: Callable[..., Any]) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    loss_fn(twin(call.tensors[0]), call.tensors[1]).backward()
    return [p.grad for p in twin.parameters() if p.grad is not None]


def forms() -> list[tuple[str, str]]:
    model, call = setting()
    captured = offer_choices(capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1), "eager", Context(least_fraction=0.0))
    return sorted({(op.name, v.name) for op in captured.graph.ops for v in op.variants})


def test_what_is_offered() -> None:
    names = {variant for _, variant in forms()}
    assert names == {"in place", "from bits", "narrow indices", "8 slices"}


@pytest.mark.parametrize(("op_name", "variant_name"), forms())
def test_a_step_with_one_variant_everywhere(op_name: str, variant_name: str) -> None:
    model, call = setting()
    captured = offer_choices(capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1), "eager", Context(least_fraction=0.0))
    graph = captured.graph

    def chosen(op: Op) -> int:
        matching = [k + 1 for k, v in enumerate(op.variants) if (op.name, v.name) == (op_name, variant_name)]
        return matching[0] if matching else 0

    wanted = {"from bits": "memfit.pack_bits", "narrow indices": "memfit.narrow_indices"}.get(variant_name)
    optional = {"memfit.pack_bits", "memfit.narrow_indices", "memfit.norm_apply"}
    sequence = [(op.id, chosen(op)) for op in graph.ops if op.name not in optional or op.name == wanted]
    schedule = schedule_from_ops(graph, sequence)
    if (op_name, variant_name) == ("aten.gelu.default", "in place"):
        with pytest.raises(IllegalSchedule, match="overwritten in place"):
            simulate(graph, schedule)  # gelu's backward reads its input: the judge sees it
        return
    simulate(graph, schedule)
    assert any(step.variant for step in schedule.computes)
    ours = gradients_of(captured, schedule, model, call)
    plain = plain_gradients(setting()[0], call, nn.functional.cross_entropy)
    exact = "slices" not in variant_name
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)


def test_norms_from_their_statistics() -> None:
    model, call = setting()
    captured = offer_choices(capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1), "eager", Context(least_fraction=0.0))
    graph = captured.graph
    apply = [op for op in graph.ops if op.name == "memfit.norm_apply"]
    assert len(apply) == 2
    boundary = captured.boundary
    plain = [(op.id, 0) for op in graph.ops if op.name not in ("memfit.pack_bits", "memfit.narrow_indices", "memfit.norm_apply")]
    position = next(i for i, (op, _) in enumerate(plain) if op > boundary)
    schedule = schedule_from_ops(graph, [*plain[:position], *((op.id, 0) for op in apply), *plain[position:]])
    simulate(graph, schedule)
    again = [graph.ops[s.op].name for s in schedule.computes if graph.ops[s.op].name == "memfit.norm_apply"]
    assert again, "the norms' outputs are read in backward, so they are made again"
    ours = gradients_of(captured, schedule, model, call)
    for a, b in zip(ours, plain_gradients(setting()[0], call, nn.functional.cross_entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(16, 300, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens))).flatten(0, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_in_chunks(reduction: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Words()
    tokens = torch.randint(0, 300, (4, 12))
    labels = tokens.roll(-1, 1).flatten().clone()
    labels[::5] = -100
    call = Call.flatten((tokens, labels), {})

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, target, reduction=reduction)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        captured = chunk_loss(capture(model, call, loss_fn=loss_fn, num_targets=1), least_fraction=0.0)
        plain = plain_gradients(model, call, loss_fn)
    assert captured is not None
    names = [op.name for op in captured.graph.ops]
    assert "memfit.chunked_loss" in names
    assert not any("softmax" in name for name in names)
    schedule = plan(captured.graph, planner="keep_all").require_plan().schedule
    for a, b in zip(gradients_of(captured, schedule, model, call), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-5, atol=2e-2 * float(b.abs().max()) if autocast else 1e-7)


def test_logits_that_somebody_else_reads_stay_whole() -> None:
    model = Words()
    call = Call.flatten((torch.randint(0, 300, (4, 12)), torch.randint(0, 300, (48,))), {})

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, target) + logits.square().mean()

    assert chunk_loss(capture(model, call, loss_fn=loss_fn, num_targets=1), least_fraction=0.0) is None


@pytest.mark.parametrize(
    "squash", [lambda x: 5 * torch.tanh(x / 5), lambda x: x / 0.7, lambda x: x.float() * 2.5, lambda x: torch.tanh(torch.tanh(x) * 3)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_done_to_logits_one_by_one_is_done_in_chunks(squash: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    model = Words()
    call = Call.flatten((torch.randint(0, 300, (4, 12)), torch.randint(0, 300, (48,))), {})

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(squash(logits), target)

    whole = capture(model, call, loss_fn=loss_fn, num_targets=1)
    captured = fuse_loss(whole, PlainOps(), least_fraction=0.0) if compiled else chunk_loss(whole, least_fraction=0.0)  # type: ignore[arg-type]
    assert captured is not None
    assert not any("softmax" in op.name or "tanh" in op.name for op in captured.graph.ops[2:-2] if "head" in op.where)
    schedule = plan(captured.graph, planner="keep_all").require_plan().schedule
    for a, b in zip(gradients_of(captured, schedule, model, call), plain_gradients(model, call, loss_fn), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def losses_that_are_no_rows_of_one_sum() -> list[Any]:
    """Each reads logits of Words, (48, 300), in a way that chunks of rows do not compute."""
    cross = nn.functional.cross_entropy
    return [
        lambda logits, target: (cross(logits, target, reduction="none") * torch.arange(48)).sum(),
        lambda logits, target: cross(logits, target, weight=torch.linspace(0.1, 1, 300)),
        lambda logits, target: cross(logits[:40], target[:40]),
        lambda logits, target: cross(logits.t(), torch.arange(300) % 48),
        lambda logits, target: nn.functional.nll_loss(torch.log_softmax(logits, 0), target),
        lambda logits, target: cross(logits * logits.tanh(), target),
        lambda logits, target: cross(logits * torch.linspace(0, 1, 300), target),
    ]


@pytest.mark.parametrize("number", range(7))
def test_a_loss_that_is_no_sum_over_all_rows_stays_as_it_is(number: int) -> None:
    model, loss_fn = Words(), losses_that_are_no_rows_of_one_sum()[number]
    call = Call.flatten((torch.randint(0, 300, (4, 12)), torch.randint(0, 300, (48,))), {})
    assert chunk_loss(capture(model, call, loss_fn=loss_fn, num_targets=1), least_fraction=0.0) is None


def test_square_logits_that_are_transposed_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 12, bias=False))
    call = Call.flatten((torch.randn(12, 6), torch.arange(12)), {})
    for turn, found in ((False, True), (True, False)):

        def loss_fn(logits: torch.Tensor, target: torch.Tensor, turn: bool = turn) -> torch.Tensor:
            return nn.functional.cross_entropy(logits.t() if turn else logits, target)

        captured = chunk_loss(capture(model, call, loss_fn=loss_fn, num_targets=1), least_fraction=0.0)
        assert (captured is not None) is found


def test_the_chunked_offer_goes_below_the_plain_minimum() -> None:
    model = Words()
    tokens = torch.randint(0, 300, (8, 64))
    call = Call.flatten((tokens, tokens.flatten()), {})
    forms = Forms(Task(model=model, loss_fn=nn.functional.cross_entropy, num_targets=1), call).usual()
    graphs = [form.captured.graph for form in forms]
    minima = [plan(graph, uniform_costs(graph), 0, time_limit_s=1).lower_bound_bytes for graph in graphs]
    assert minima[-1] < 0.7 * minima[0]


@pytest.mark.parametrize("shape", [(3, 5, 7), (8,), (1, 1), (2, 16, 4, 4)])
def test_bits_round_trip(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    gradient = torch.randn(shape)
    packed = PackSigns()(x)
    assert packed.numel() == count_packed_bytes(x.numel())
    found = ReluGradientFromBits(tuple(x.shape), x.stride())(gradient, packed)
    assert torch.equal(found, aten.threshold_backward.default(gradient, x.relu(), 0))


def test_bits_in_channels_last() -> None:
    x = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    gradient = torch.randn(2, 8, 3, 3)
    found = ReluGradientFromBits(tuple(x.shape), x.stride())(gradient, PackSigns()(x))
    assert torch.equal(found, aten.threshold_backward.default(gradient, x.relu(), 0))


def test_a_loss_in_chunks_where_the_softmax_is_in_half_precision() -> None:
    """As CUDA's autocast traces it: log-softmax in bfloat16, the loss in 32 bits, casts on both sides."""
    torch.manual_seed(0)
    model = Words().to(torch.bfloat16)
    tokens = torch.randint(0, 300, (4, 12))
    call = Call.flatten((tokens, tokens.roll(-1, 1).flatten()), {})

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.nll_loss(torch.log_softmax(logits, 1).float(), target)

    captured = chunk_loss(capture(model, call, loss_fn=loss_fn, num_targets=1), least_fraction=0.0)
    assert captured is not None
    plain = plain_gradients(model, call, loss_fn)
    schedule = plan(captured.graph, planner="keep_all").require_plan().schedule
    for a, b in zip(gradients_of(captured, schedule, model, call), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(b.abs().max()))


def test_large_convolutions_in_slices() -> None:
    model, call = setting()
    plain = capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1)
    captured = slice_convolutions(plain, least_fraction=0.0)
    assert captured is not None
    assert captured.graph.digest != plain.graph.digest
    assert sum("in slices" in op.name for op in captured.graph.ops) == 4
    schedule = plan(captured.graph, planner="keep_all").require_plan().schedule
    for a, b in zip(
        gradients_of(captured, schedule, model, call), plain_gradients(setting()[0], call, nn.functional.cross_entropy), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch", [4, 11, 16])
def test_slices_of_any_batch(batch: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(batch, 3, 6, 6), torch.randn(5, 3, 3, 3), torch.randn(5)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    whole = aten.convolution.default(x, weight, bias, *settings)
    torch.testing.assert_close(ConvolutionInSlices(min(8, batch))(x, weight, bias, *settings), whole)
    gradient = torch.randn_like(whole)
    rest = ([5], *settings, [True, True, True])
    ours = ConvolutionBackwardInSlices(min(8, batch))(gradient, x, weight, *rest)
    for a, b in zip(ours, aten.convolution_backward.default(gradient, x, weight, *rest), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
