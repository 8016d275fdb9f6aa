"""Groups of fusible ops, what crosses between them, and the coarse step: same values, same bytes, fewer ops.

The compiler here compiles nothing: a region runs its ops one by one, so every difference is the gathering's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call
from memfit.compilers.inductor.compiler import Inductor
from memfit.core.costs import Costs
from memfit.core.errors import Unsupported
from memfit.core.plan import Plan
from memfit.core.simulate import simulate
from memfit.passes.regions.groups import Fusion
from memfit.passes.regions.piece import Region, _Form
from memfit.passes.regions.regions import gather_regions, regions_of
from memfit.pipeline.capture import capture
from memfit.pipeline.costs import leave_out_beaten, measure_costs
from memfit.pipeline.known_costs import Cache
from memfit.planning import plan as find_plan
from memfit.planning.model.to_schedule import schedule_from_ops
from memfit.profile.roofline import roofline
from memfit.runtime.autograd_step import Ready, Session, run, source_bytes
from memfit.runtime.codegen import generate
from memfit.torch_private.allocations import peaks_of

aten = torch.ops.aten
LIBRARY = {aten.mm, aten.addmm, aten.bmm, aten.convolution, aten.convolution_backward}


class OneByOne:
    """A compiler that runs pieces as they are."""

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return Inductor().decompositions

    def improve(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return module

    def fuses(self, target: Any) -> bool:
        return isinstance(target, torch._ops.OpOverload) and target.overloadpacket not in LIBRARY

    @contextmanager
    def together(self) -> Iterator[None]:
        yield

    def compile(
        self, module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]
    ) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        return lambda inputs: module(*inputs)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.two, self.other = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.other(self.two(torch.relu(self.norm(self.one(x))))))


class Net(nn.Module):
    """Residual blocks, a concatenation, a pooled head."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([first, x], 1).mean((2, 3)))


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Captured]:
    torch.manual_seed(0)
    model = Net().double()
    data = torch.randn(4, 3, 12, 12, dtype=torch.float64), torch.randint(0, 5, (4,))
    call = Call.flatten(data, {})
    return model, data, capture(model, call, loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=OneByOne())


def test_linked_ops_between_library_calls_are_one_group(step: Any) -> None:
    _, _, fine = step
    fusion = Fusion(fine, OneByOne().fuses)
    for group in fusion.groups:
        assert len({fusion.depth[op] for op in group.ops}) == 1
        assert len({fusion.backward[op] for op in group.ops}) == 1
    large = [g for g in fusion.groups if not g.is_backward and any(fusion.size(v) >= 8 * 8 * 144 for v in g.outputs)]
    assert len(large) == 5  # a normalisation with its activation after each convolution; the last is pooled and not kept


def test_backward_makes_elementwise_forward_values_again(step: Any) -> None:
    _, _, fine = step
    fusion = Fusion(fine, OneByOne().fuses)
    masks = [op.id for op in fine.graph.ops if op.name.startswith(("aten.le", "aten.gt"))]
    assert masks
    assert not any(t in fusion.crossing for op in masks for t in fine.graph.ops[op].outputs)


def test_pooling_keeps_offsets_of_eight_bits_and_backward_makes_positions_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3), nn.MaxPool2d(3, 2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(6 * 4, 5)).double()
    data = torch.randn(4, 3, 14, 14, dtype=torch.float64), torch.randint(0, 5, (4,))
    fine = capture(model, Call.flatten(data, {}), loss_fn=nn.functional.cross_entropy, num_targets=1, compiler=OneByOne())
    coarse = gather_regions(fine, OneByOne())
    pooled = [fine.samples[t] for t in Fusion(fine, OneByOne().fuses).crossing]
    kinds = {s.dtype for s in pooled if s is not None and s.dim() == 4 and not s.is_floating_point()}
    assert kinds == {torch.int8}
    costs = measure_costs(coarse, cache=Cache(tmp_path / "costs.json"))
    _check_against_plain(model, data, coarse, costs, find_plan(coarse.graph, costs, None, planner="keep_all").require_plan())


def test_equal_blocks_share_one_region(step: Any) -> None:
    _, _, fine = step
    coarse = gather_regions(fine, OneByOne())
    assert len(coarse.graph.ops) < len(fine.graph.ops) / 3
    used = [c.target for c in coarse.calls if isinstance(c.target, Region)]
    assert len(regions_of(coarse)) < len(used) / 1.5


def test_the_coarse_step_keeps_sources_results_and_roles(step: Any) -> None:
    _, _, fine = step
    coarse = gather_regions(fine, OneByOne())
    for role in (Role.ACCUMULATE, Role.BACKWARD_BEGINS):
        assert sum(c.role is role for c in coarse.calls) == sum(c.role is role for c in fine.calls)
    assert len(coarse.graph.sources) == len(fine.graph.sources)
    assert source_bytes(coarse) == source_bytes(fine)
    assert len(coarse.convention.mutations) == len(fine.convention.mutations) == 18


@pytest.mark.parametrize("fraction", [1.0, 0.8, 0.65])
def test_values_and_bytes_are_those_of_the_plain_model(step: Any, fraction: float, tmp_path: Path) -> None:
    model, data, fine = step
    coarse = gather_regions(fine, OneByOne(), least_fraction=0.0)
    costs = measure_costs(coarse, cache=Cache(tmp_path))
    whole = find_plan(coarse.graph, costs, None, planner="keep_all").require_plan()
    plan = find_plan(coarse.graph, costs, int(whole.timeline.peak_bytes * fraction), time_limit_s=5).require_plan()
    _check_against_plain(model, data, coarse, costs, plan)


def _check_against_plain(model: nn.Module, data: Any, coarse: Captured, costs: Costs, plan: Plan) -> None:
    """Gradients and buffers of the plain model, bytes of the plan."""
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    nn.functional.cross_entropy(plain(data[0]), data[1]).backward()
    ready = Ready(captured=coarse, costs=costs, plan=plan, program=generate(coarse, plan.schedule), keep_all_peak_bytes=0, base_time_ns=0)
    sources = (*planned.parameters(), *planned.buffers(), *data)

    def once() -> None:
        run(Session(ready, sources, trial=False, replan=lambda _: None)).backward()

    _, peak = peaks_of(once, torch.device("cpu"))
    for a, b in zip(planned.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
    for a, b in zip(planned.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert 0 <= plan.timeline.peak_bytes - (peak + source_bytes(coarse)) < 1024


def test_a_region_over_its_input_gives_the_same_values(step: Any, tmp_path: Path) -> None:
    model, data, fine = step
    coarse = gather_regions(fine, OneByOne(), least_fraction=0.0)
    costs = measure_costs(coarse, cache=Cache(tmp_path))
    op, v = next((op, k + 1) for op in coarse.graph.ops for k, x in enumerate(op.variants) if x.inplace_of)
    ((_, overwritten),) = op.form(v).inplace_of
    executions: list[tuple[int, int]] = []
    for other in coarse.graph.ops:
        if not other.name.startswith(("again", "apart")):
            if overwritten in other.inputs and (op.id, v) in executions:  # somebody reads it after all: it is made again
                executions.append((coarse.graph.producers[overwritten][0], 0))
            executions.append((other.id, v if other is op else 0))
    schedule = schedule_from_ops(coarse.graph, executions, costs)
    timeline = simulate(coarse.graph, schedule, costs)
    _check_against_plain(
        model, data, coarse, costs, Plan(schedule=schedule, timeline=timeline, planner="by hand", graph_digest=coarse.graph.digest)
    )


def test_other_ways_to_a_value_are_offered_and_can_be_left_out(step: Any) -> None:
    _, _, fine = step
    coarse = gather_regions(fine, OneByOne(), least_fraction=0.0)
    kinds = {op.name.split()[0] for op in coarse.graph.ops}
    assert {"region", "again", "apart"} <= kinds
    assert any(op.variants for op in coarse.graph.ops)
    plain = gather_regions(fine, OneByOne(), choices=False)
    assert not any(op.variants or op.name.startswith(("again", "apart")) for op in plain.graph.ops)


def test_a_form_that_reads_less_and_is_faster_leaves_no_choice(step: Any) -> None:
    _, _, fine = step
    coarse = gather_regions(fine, OneByOne(), least_fraction=0.0)
    costs = roofline(coarse, "cpu")
    slow = tuple(t * 2 if op.variants else t for t, op in zip(costs.op_time_ns, coarse.graph.ops, strict=True))
    fast = tuple(tuple(1 for _ in op.variants) for op in coarse.graph.ops)
    fewer, left = leave_out_beaten(coarse, _replaced(costs, slow, fast))
    deeper = [op for op in fewer.graph.ops if op.name.startswith("deeper")]
    assert deeper
    assert all(not op.variants for op in deeper)
    assert left.graph_digest == fewer.graph.digest


def test_a_form_over_its_input_is_as_fast_as_its_twin_up_to_noise(step: Any) -> None:
    _, _, fine = step
    coarse = gather_regions(fine, OneByOne(), least_fraction=0.0)
    costs = roofline(coarse, "cpu")
    op, v = next(
        (op, k + 1) for op in coarse.graph.ops for k, x in enumerate(op.variants) if x.inplace_of and set(x.inputs) == set(op.inputs)
    )
    for factor, even in ((1.04, True), (1.5, False)):
        times = [list(row) for row in costs.variant_time_ns]
        times[op.id][v - 1] = int(costs.op_time_ns[op.id] * factor)
        fewer, left = leave_out_beaten(coarse, _replaced(costs, costs.op_time_ns, tuple(map(tuple, times))))
        at = next(k + 1 for k, x in enumerate(fewer.graph.ops[op.id].variants) if x.name == op.variants[v - 1].name)
        assert (left.time_ns(op.id, at) == costs.op_time_ns[op.id]) is even


def test_a_form_over_its_input_with_as_large_a_workspace_is_no_choice(step: Any) -> None:
    _, _, fine = step
    coarse = gather_regions(fine, OneByOne(), least_fraction=0.0)
    costs = roofline(coarse, "cpu")
    op, v = next((op, k + 1) for op in coarse.graph.ops for k, x in enumerate(op.variants) if x.inplace_of)
    overwritten = sum(coarse.graph.size_of(old) for _, old in op.form(v).inplace_of)
    for workspace, left in ((overwritten - 1, True), (overwritten, False)):
        sizes = [list(row) for row in costs.variant_workspace_bytes]
        sizes[op.id][v - 1] = costs.workspace_bytes[op.id] + workspace
        fewer, _ = leave_out_beaten(coarse, replace(costs, variant_workspace_bytes=tuple(map(tuple, sizes))))
        assert any(x.inplace_of for x in fewer.graph.ops[op.id].variants) is left


def region_that(run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], *traced: torch.Tensor) -> Region:
    """A region whose compiled code is `run`, traced with results like these."""
    region = object.__new__(Region)
    region.digest = "0"
    region._run, region._trusted, region._source, region._over = run, False, None, ()
    region._wanted = tuple(_Form.of(t) for t in traced)
    return region


def test_outputs_that_share_memory_are_taken_apart() -> None:
    x = torch.ones(3, 4)
    region = region_that(lambda inputs: (inputs[0], inputs[0]), x, x.t().contiguous().t())
    for _ in range(2):
        a, b = region(x)
        assert len({t.untyped_storage()._cdata for t in (x, a, b)}) == 3
        assert torch.equal(a, x)
        assert b.stride() == (1, 3)  # laid out as promised, also what shared memory


def test_a_sum_that_lost_its_dimensions_gets_them_back() -> None:
    x = torch.randn(5, 4, 3)
    region = region_that(lambda inputs: (inputs[0].sum((0, 1)),), x.sum((0, 1), keepdim=True))
    for _ in range(2):
        assert torch.equal(region(x)[0], x.sum((0, 1), keepdim=True))


@pytest.mark.parametrize(
    ("made", "message"),
    [((), "0 results"), ((torch.ones(4, 3),), r"\(4, 3\).*traced as .*\(3, 4\)"), ((torch.ones(3, 4).double(),), "float64.*float32")],
)
def test_results_of_another_kind_than_traced_are_refused(made: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        region_that(lambda _: made, torch.ones(3, 4))(torch.ones(3, 4))


def test_a_region_that_writes_over_its_input_runs_once_although_its_results_lie_otherwise() -> None:
    runs = list[int]()

    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        runs.append(1)
        inputs[0].mul_(2)
        return (inputs[0].t().contiguous().t() + 0,)

    x = torch.ones(3, 4)
    (found,) = region_that(run, torch.ones(3, 4))(x)
    assert len(runs) == 1
    assert found.is_contiguous()
    assert float(found.max()) == 2


def _replaced(costs: Costs, times: tuple[int, ...], variants: tuple[tuple[int, ...], ...]) -> Costs:
    return replace(costs, op_time_ns=times, variant_time_ns=variants)


def test_layers_with_dropout_share_their_regions_although_their_seeds_differ() -> None:
    def regions(layers: int) -> int:
        parts = [m for _ in range(layers) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))]
        model, x = nn.Sequential(*parts, nn.Linear(16, 1)), torch.randn(64, 16)
        fine = capture(model, Call.flatten((x,), {}), loss_fn=torch.mean, compiler=Inductor())
        return len(regions_of(gather_regions(fine, Inductor())))

    assert regions(8) == regions(4)


def test_results_in_another_layout_than_promised_are_copied() -> None:
    """A compiler may choose: what reads them was compiled for what was traced."""

    class Transposing(OneByOne):
        def compile(self, module: Any, samples: Any) -> Any:
            run = super().compile(module, samples)
            return lambda inputs: [t.mT.contiguous().mT if t.dim() == 2 else t for t in run(inputs)]

    model, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)), torch.randn(5, 4)
    captured = gather_regions(capture(model, Call.flatten((x,), {}), compiler=Transposing()), Transposing())
    seen = 0
    for call in (c for c in captured.calls if isinstance(c.target, Region)):
        samples = [captured.samples[a.tensor] for a in call.args]
        inputs = [torch.rand(s.shape).as_strided(s.shape, s.stride()) for s in samples if s is not None]
        for _ in range(2):
            for tensor, made in zip(call.outputs, call.target(*inputs), strict=True):
                sample = None if tensor is None else captured.samples[tensor]
                assert sample is not None
                assert made.stride() == sample.stride()
                seen += made.dim() == 2 and made.numel() > 1
    assert seen
