"""Costs at a size at which nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.small import graph_of, op

from memfit.capture.captured import Captured, Convention, OpCall
from memfit.core.costs import Costs
from memfit.core.graph import Graph, Variant
from memfit.pipeline.scaled_costs import Priced, have_same_ops, scale_costs


def graph(size: int, *, name: str = "f0") -> Graph:
    """A source of fixed size, an op that makes something of this size (in two ways), one that reads it."""
    first = replace(op(0, [0], [1]), name=name, variants=(Variant(name="slowly", inputs=(0,), outputs=(1,)),))
    return graph_of([100, size, 10], [first, op(1, [1], [2])], results=[2])


def captured(size: int, **details: Any) -> Captured:
    made = graph(size, **details)
    convention = Convention(
        sources=(0,),
        num_parameters=0,
        num_buffers=0,
        num_inputs=1,
        outputs=(),
        output_spec=None,
        differentiable=(),
        tangents=(),
        mutations=(),
    )
    return Captured(
        graph=made,
        calls=(OpCall(), OpCall()),
        convention=convention,
        samples=(None, None, None),
        device=torch.device("cpu"),
        has_backward=False,
        accumulates=False,
    )


def priced(size: int) -> Priced:
    made = graph(size)
    costs = Costs(
        op_time_ns=(1000, 10 * size),
        workspace_bytes=(40, 7),
        variant_time_ns=((3000,), ()),
        variant_workspace_bytes=((8,), ()),
        device="here",
        graph_digest=made.digest,
    )
    return Priced(graph=made, costs=costs)


def test_a_smaller_size_takes_time_by_its_bytes_and_the_same_workspace() -> None:
    step = captured(400)
    costs = scale_costs(step, [priced(900)])
    assert costs is not None
    assert costs.op_time_ns == (500, round(9000 * 410 / 910))
    assert costs.variant_time_ns == ((1500,), ())
    assert (costs.workspace_bytes, costs.variant_workspace_bytes) == ((40, 7), ((8,), ()))
    assert (costs.graph_digest, costs.device) == (step.graph.digest, "here")


def test_a_larger_size_takes_more_of_both() -> None:
    costs = scale_costs(captured(1100), [priced(900)])
    assert costs is not None
    assert costs.op_time_ns[0] == 1200
    assert costs.workspace_bytes == (48, 9)
    assert costs.variant_workspace_bytes == ((10,), ())


def test_the_nearest_larger_size_counts() -> None:
    costs = scale_costs(captured(1000), [priced(900), priced(5000), priced(1900)])
    assert costs is not None
    assert costs.op_time_ns[0] == 550


def test_what_is_far_larger_than_all_that_was_measured_has_to_be_measured() -> None:
    assert scale_costs(captured(2000), [priced(900), priced(500)]) is None


def test_other_ops_have_other_costs() -> None:
    assert scale_costs(captured(900, name="g"), [priced(900)]) is None
    assert scale_costs(captured(900), []) is None


@pytest.mark.parametrize("change", [{"results": (1, 2)}, {"sources": (0, 1)}])
def test_graphs_with_the_same_ops_differ_in_sizes_only(change: dict[str, Any]) -> None:
    assert have_same_ops(graph(3), graph(4))
    assert not have_same_ops(graph(3), replace(graph(4), digest="", **change))
