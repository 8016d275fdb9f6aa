"""What must hold of a step between any two passes. Tests look after every rewrite: `watch_passes(check_rewritten)`.

Ids that are positions are checked by `Graph` itself. Here: that calls, samples and costs belong to the graph they stand beside.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.costs import Costs
from memfit.core.graph import Op, Variant
from memfit.passes.interface import Pass
from memfit.torch_private.trees import leaves_of


def check_rewritten(rewrite: Pass[Any], before: Any, after: Any) -> None:
    """An AssertionError names the pass and what it broke."""
    try:
        if isinstance(after, torch.fx.GraphModule):
            _check_traced(after)
        elif isinstance(after, Captured):
            check_captured(after)
        else:
            captured, costs = after
            check_captured(captured)
            _check_costs(captured, costs)
    except AssertionError as error:
        raise AssertionError(f"after the pass {rewrite.name}: {error}") from error


def check_captured(captured: Captured) -> None:
    graph = captured.graph
    assert len(captured.calls) == len(graph.ops), f"{len(captured.calls)} calls for {len(graph.ops)} ops"
    assert len(captured.samples) == len(graph.tensors), f"{len(captured.samples)} samples for {len(graph.tensors)} tensors"
    for op in graph.ops:
        calls = captured.variant_calls[op.id] if captured.variant_calls else ()
        assert len(calls) == len(op.variants), f"op {op.id} ({op.name}) has {len(op.variants)} variants and {len(calls)} calls for them"
        _check_call(op, op, captured.calls[op.id])
        for form, call in zip(op.variants, calls, strict=True):
            _check_call(op, form, call)
    convention = captured.convention
    assert set(convention.sources) <= set(graph.sources), "a source of the call is none of the graph's"
    known = range(len(graph.tensors))
    loose = [*convention.tangents, *(t for _, t in convention.mutations), *(o.tensor for o in convention.outputs if isinstance(o, Ref))]
    assert all(t in known for t in loose), "the convention names a tensor that the graph has not got"
    assert all(op < len(graph.ops) for op, _ in captured.fixed_workspace), "workspace for an op that the graph has not got"
    _check_samples(captured)


def _check_call(op: Op, form: Op | Variant, call: OpCall) -> None:
    if call.role is not Role.CALL:
        return
    what = f"op {op.id} ({op.name}), form {form.name!r},"
    assert call.target is not None, f"{what} runs nothing"
    read = {v.tensor for v in leaves_of((call.args, dict(call.kwargs))) if isinstance(v, Ref)}
    made = {t for t in call.outputs if t is not None}
    assert read <= set(form.inputs), f"{what} is given {sorted(read - set(form.inputs))} and does not say that it reads them"
    assert made == set(form.outputs), f"{what} makes {sorted(made)} and says {sorted(form.outputs)}"


def _check_samples(captured: Captured) -> None:
    """A storage is as large as what lies in it; one of no bytes stands for those of another (a gradient that becomes `.grad` as it is)."""
    graph = captured.graph
    for tensor, sample in zip(graph.tensors, captured.samples, strict=True):
        room = graph.storages[tensor.storage].size_bytes
        if sample is None or 0 in sample.shape or not room:
            continue
        reach = 1 + sum((size - 1) * stride for size, stride in zip(sample.shape, sample.stride(), strict=True))
        assert reach * sample.element_size() <= room, (
            f"tensor {tensor.id} reaches over {reach * sample.element_size()} bytes in a storage of {room}"
        )


def _check_costs(captured: Captured, costs: Costs) -> None:
    assert costs.graph_digest == captured.graph.digest, "the costs are of another graph"
    assert len(costs.op_time_ns) == len(captured.graph.ops), "not as many costs as ops"


def _check_traced(module: torch.fx.GraphModule) -> None:
    module.graph.lint()
    bare = [node for node in module.graph.nodes if node.op == "call_function" and "val" not in node.meta]
    assert not bare, f"{bare[0]} has no sample"
