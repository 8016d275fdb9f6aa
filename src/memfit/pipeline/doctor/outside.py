"""What only the user can change, each with the minimum that the step would have then: fewer rows, another optimizer, fewer trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call
from memfit.capture.lower.optimizer_bytes import OptimizerBytes, optimizer_bytes
from memfit.capture.lower.optimizer_twin import unwrap
from memfit.core.errors import MemfitError
from memfit.core.graph import Graph, Kind
from memfit.core.units import format_bytes
from memfit.pipeline.costs import Costed, TableCosts
from memfit.pipeline.doctor.floors import Lowest
from memfit.report.diagnosis import Remedy

_HARDLY = 0.01


def fewer_rows(call: Call, lowest: Lowest, minimum_with: Callable[[Call], int]) -> Iterator[Remedy]:
    """Half of the batch, where all tensors of the call have as many rows. A model may refuse another batch in any way it likes."""
    rows = {t.shape[0] for t in call.tensors if t.dim()}
    if len(rows) != 1 or (whole := rows.pop()) < 2:
        return
    halves = {id(t): t.detach()[: whole // 2].clone() for t in call.tensors if t.dim()}  # what is given twice is one tensor again
    half = replace(call, tensors=tuple(halves.get(id(t), t) for t in call.tensors))
    try:
        after = minimum_with(half)
    except Exception:
        return
    a_row = (lowest.bytes - after) // (whole - whole // 2)
    what = f"{whole // 2} rows instead of {whole}"
    if lowest.bytes - after < _HARDLY * lowest.bytes:
        yield Remedy(what=what, after_bytes=None, note="next to nothing less, the minimum is held by something else")
    else:
        yield Remedy(what=what, after_bytes=after, note=f"about {format_bytes(a_row)} a row")


def other_optimizers(optimizer: Any, known: list[Lowest], costs: TableCosts, target: str | None) -> Iterator[Remedy]:
    """The same one stepping parameter by parameter, and two with less state; those that lower the minimum."""
    if optimizer is None:
        return
    real = unwrap(optimizer)
    parameters = [p for group in real.param_groups for p in group["params"]]
    others: dict[str, Callable[[], torch.optim.Optimizer]] = {
        f"{type(real).__name__} with foreach=False": lambda: _one_by_one(real, parameters),
        "SGD with momentum": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "SGD": lambda: torch.optim.SGD(parameters, lr=1e-3),
    }
    lowest_yet = known[0].bytes
    for name, make in others.items():
        try:
            found = optimizer_bytes(make(), device=target)
        except (MemfitError, TypeError, ValueError):
            continue  # not with these parameters
        after = min(_with_optimizer(form, found, costs) for form in known)
        if after < lowest_yet:
            lowest_yet = after
            yield Remedy(what=name, after_bytes=after, note=f"its state is {format_bytes(found.state_bytes)}")


def _one_by_one(real: Any, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if "foreach" not in real.defaults:
        raise ValueError("has no such setting")
    made: torch.optim.Optimizer = type(real)(parameters, **{**real.defaults, "foreach": False, "fused": False})
    return made


def _with_optimizer(form: Lowest, found: OptimizerBytes, costs: TableCosts) -> int:
    """The minimum of a form of the step with another optimizer after it."""
    captured = form.costed.captured
    storages = tuple(
        replace(s, size_bytes=found.state_bytes) if s.kind is Kind.OPTIMIZER and s.size_bytes else s for s in captured.graph.storages
    )
    steps = {op for op, call in enumerate(captured.calls) if call.role is Role.OPTIMIZER}
    workspace = tuple((op, found.temporary_bytes if op in steps else size) for op, size in captured.fixed_workspace)
    changed = replace(captured, graph=replace(captured.graph, storages=storages, digest=""), fixed_workspace=workspace)
    return _minimum(changed, costs)


def _minimum(captured: Captured, costs: TableCosts) -> int:
    return Lowest(costed=Costed(name="", captured=captured, costs=costs.of(captured))).bytes


def count_lasting(graph: Graph) -> dict[str, int]:
    """What stays from step to step, by kind: what the step is given and what it leaves."""
    lasting = {graph.storage_of(t) for t in (*graph.sources, *graph.results)}
    kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER, Kind.INPUT)
    return {str(kind): sum(graph.storages[s].size_bytes for s in lasting if graph.storages[s].kind is kind) for kind in kinds}


def frozen_parameters(graph: Graph) -> Iterator[Remedy]:
    """What training fewer parameters can spare: their gradients and the optimizer's state."""
    lasting = count_lasting(graph)
    gradients, state = lasting[Kind.GRADIENT], lasting[Kind.OPTIMIZER]
    if gradients:
        yield Remedy(
            what="frozen parameters, or adapters (LoRA)",
            after_bytes=None,
            note=f"gradients of what is trained hold {format_bytes(gradients)}, optimizer state {format_bytes(state)}",
        )


def offloading(lowest: Lowest, reached_bytes: int | None, allow: tuple[str, ...]) -> Iterator[Remedy]:
    """Values that wait on the host leave the device between their uses, not at the op that reads them."""
    if reached_bytes is not None and reached_bytes > 1.01 * lowest.bytes and "offload" not in allow:
        yield Remedy(
            what='allow=(..., "offload")',
            after_bytes=None,
            note=f"does not lower the minimum; may find plans in the {format_bytes(reached_bytes - lowest.bytes)} between it and what was reached",
        )
