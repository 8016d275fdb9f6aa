"""A step traced once with open sizes is, at each size, the step that a trace of that size gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.capture.capture import Surroundings, Traced, lower_step, trace_step
from memfit.capture.captured import Captured, Ref
from memfit.capture.inputs import Call
from memfit.capture.trace.open_graph import OpenGraph
from memfit.core.errors import Unsupported
from memfit.torch_private.symbolic import Varying
from memfit.torch_private.trees import map_leaves

ROWS_AND_LENGTH: Varying = {0: frozenset({0, 1})}


class Attention(nn.Module):
    """Positions, heads taken apart and put together, a mask, a scale that depends on the length, a part of the rows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, width), nn.Embedding(64, width)
        self.into, self.norm, self.out = nn.Linear(width, 3 * width), nn.LayerNorm(width), nn.Linear(width, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        x = self.norm(self.words(tokens) + self.places(torch.arange(length)))
        q, k, v = self.into(x).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = functional.scaled_dot_product_attention(q, k, v, mask) / torch.sym_sqrt(length) + v.mean(2, keepdim=True) * (length + 1) ** -0.3
        logits = self.out(x.transpose(1, 2).reshape(rows, length, -1))[:, :]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(5, 6, 3, stride=2, padding=1), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.avg_pool1d(functional.relu(self.norm(self.first(x))), 2)
        return self.last(functional.pad(x, (1, 0)).mean(-1)).sum()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y.relu() if x.shape[1] > 10 else y.tanh()).sum()


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % 13


def images(rows: int, length: int) -> torch.Tensor:
    return torch.ones(rows, 5, length)


def lowered(model: nn.Module, call: Call, step: Traced) -> Captured:
    return lower_step(step, lambda module: module, Surroundings(), compiled=False)


def describe(captured: Captured) -> list[Any]:
    """All but views of a whole tensor, of which tracing makes more or fewer, and the numbers of tensors, which follow from those."""
    graph = captured.graph
    kept = [op for op in graph.ops if op.name != "aten.alias.default"]
    samples = [[captured.samples[t] for t in op.outputs] for op in kept]
    made = [[None if s is None else (s.shape, s.stride(), s.dtype) for s in row] for row in samples]
    given = [map_leaves(lambda v: "" if isinstance(v, Ref) else v, captured.calls[op.id].args) for op in kept]
    return [[op.name for op in kept], made, given, sorted((s.size_bytes, str(s.kind)) for s in graph.storages)]


@pytest.mark.parametrize(
    ("make", "data", "varying"),
    [(Attention, tokens, ROWS_AND_LENGTH), (Convolved, images, {0: frozenset({0, 2})}), (Attention, tokens, {0: frozenset({1})})],
)
def test_it_is_the_step_of_each_size(make: Callable[[], nn.Module], data: Callable[[int, int], torch.Tensor], varying: Varying) -> None:
    model = make()
    first = Call.flatten((data(3, 9),), {})
    graph = OpenGraph(trace_step(model, first, varying=varying).joint, first.tensors)
    for rows, length in ((3, 9), (3, 17), (3, 7), (5, 12), (2, 30)):
        if rows != 3 and 0 not in varying[0]:
            continue
        call = Call.flatten((data(rows, length),), {})
        ours = lowered(model, call, Traced(model=model, call=call, joint=graph.at(call.tensors)))
        assert describe(ours) == describe(lowered(model, call, trace_step(model, call)))


def test_a_size_on_the_other_side_of_a_branch_is_refused() -> None:
    model = Branches()
    first = Call.flatten((torch.ones(2, 12, 4),), {})
    graph = OpenGraph(trace_step(model, first, varying={0: frozenset({1})}).joint, first.tensors)
    assert graph.holds((torch.ones(2, 11, 4),))
    assert not graph.holds((torch.ones(2, 10, 4),))
    assert not graph.holds((torch.ones(2, 1, 4),))
    with pytest.raises(Unsupported, match="other sizes"):
        graph.at((torch.ones(2, 10, 4),))


def test_a_tensor_that_lies_otherwise_is_refused() -> None:
    model = Branches()
    first = Call.flatten((torch.ones(2, 12, 4),), {})
    graph = OpenGraph(trace_step(model, first, varying={0: frozenset({1})}).joint, first.tensors)
    with pytest.raises(Unsupported, match="layout"):
        graph.at((torch.ones(12, 2, 4).transpose(0, 1),))
    with pytest.raises(Unsupported, match="layout"):
        graph.at((torch.ones(3, 12, 4),))


def test_a_step_that_returns_a_size_is_refused() -> None:
    class Counts(Branches):
        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x).sum(), x.shape[1]

    first = Call.flatten((torch.ones(2, 12, 4),), {})
    joint = trace_step(Counts(), first, varying={0: frozenset({1})}).joint
    with pytest.raises(Unsupported, match="a size beside"):
        OpenGraph(joint, first.tensors)
