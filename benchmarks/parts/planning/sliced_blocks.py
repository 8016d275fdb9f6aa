"""Plans with the widest block of a network in slices of the batch, and without: on costs recorded on the H200, and on estimated ones."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.measuring import peaks_before, records
from benchmarks.lib.results import provenance, write_results
from benchmarks.models.peers import PEERS
from memfit.core.costs import Costs
from memfit.core.graph import Graph, Op
from memfit.core.outcome import Status
from memfit.planning import plan

SHARES = (1.0, 0.75, 0.5, 0.4, 1 / 3, 0.25)
COLUMNS = ("model", "costs", "budget", "GiB", "whole ops", "in slices", "slices, x keep all", "slices, x torch.compile", "block ends after")
_NUM_SLICES = 8
_LAUNCH_NS = 5_000  # for each kernel of each slice but the first
_TEXT = (
    "Milliseconds of the planned step; `whole ops` without and `in slices` with the network's first block run by slices of the batch "
    "(the fastest of up to three blocks). Nothing here ran in slices: there was no GPU. *recorded*: time and workspace of every op as "
    "measured on the H200 (`compiled.py measure --keep`); the block's two ops are put together from them: forward is the sum of its ops, "
    "backward that sum again and the sum of its backward, plus 5 us for each kernel of each further slice; of bytes and workspaces inside "
    "an eighth. *estimated*: traced on fake tensors for the compiler, roofline costs of an H200, through the same pass as `memfit.fit`. "
    "Budgets are shares of torch.compile's measured peak (recorded) or of the keep-all peak (estimated), and a third of eager's. "
    "ResNet-50 and UNet have a batch norm after their first convolution, so no block begins; the layers of ViT-L and GPT-2 are all "
    "equally wide (and GPT-2 begins with dropout), so slices of the first would leave the peak where it is: one row each says so."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A step with a block in slices."""

    ends: str
    graph: Graph
    costs: Costs


# -- recorded costs ----------------------------------------------------------------------------------------------------


def recorded_forms(graph: Graph, costs: Costs) -> Iterator[Form]:
    """The step with all up to its first, second and third pool as two ops."""
    begins = next(op.id for op in graph.ops if op.name == "memfit.backward_begins")
    pools = [op.id for op in graph.ops[:begins] if _is_pool(graph, op)]
    for number, last in enumerate(pools[:3], 1):
        yield Form(ends=f"pool {number}", **_contracted(graph, costs, last, begins))


def _is_pool(graph: Graph, op: Op) -> bool:
    """A region with a large output and offsets of a byte for each of its numbers."""
    sizes = sorted(map(graph.size_of, op.outputs))
    return op.name.startswith("region") and len(sizes) == 2 and sizes[1] == 4 * sizes[0]


def _contracted(graph: Graph, costs: Costs, last: int, begins: int) -> dict[str, Any]:
    forward = [op for op in graph.ops[: last + 1] if not _is_another_way(op)]
    made = {t for op in forward for t in op.outputs}
    border = {t for op in graph.ops[last + 1 : begins + 1] for form in op.forms for t in form.inputs} & made
    inside, backward = made - border, list[Op]()
    for op in graph.ops[begins + 1 :]:
        if not op.name.startswith("memfit.") and not inside.isdisjoint(op.inputs):
            inside.update(op.outputs)
            backward += [] if _is_another_way(op) else [op]
    every = {*(op.id for op in graph.ops[: last + 1]), *(op.id for op in graph.ops[begins + 1 :] if not inside.isdisjoint(op.outputs))}
    left = [op for op in graph.ops if op.id not in every]
    read = {t for op in left for t in op.inputs} | set(graph.results)
    first = _op("memfit.sliced_forward", forward, tuple(sorted(border)))
    second = _op("memfit.sliced_backward", [*forward, *backward], tuple(t for op in backward for t in op.outputs if t in read))
    place = min(op.id for op in backward)
    order = [first, *(op for op in left if op.id < place), second, *(op for op in left if op.id >= place)]
    own = {id(first): _cost(graph, costs, forward), id(second): _cost(graph, costs, [*forward, *backward])}
    found = [own.get(id(op)) or (costs.op_time_ns[op.id], costs.workspace_bytes[op.id]) for op in order]
    new = replace(graph, ops=tuple(replace(op, id=i) for i, op in enumerate(order)), digest="")
    old = [op.id for op in order]
    return {
        "graph": new,
        "costs": replace(
            costs,
            op_time_ns=tuple(time for time, _ in found),
            workspace_bytes=tuple(size for _, size in found),
            variant_time_ns=tuple(() if i < 0 else costs.variant_time_ns[i] for i in old) if costs.variant_time_ns else (),
            variant_workspace_bytes=tuple(() if i < 0 else costs.variant_workspace_bytes[i] for i in old)
            if costs.variant_workspace_bytes
            else (),
            graph_digest=new.digest,
        ),
    }


def _is_another_way(op: Op) -> bool:
    return op.name.startswith(("again ", "apart "))


def _op(name: str, ops: list[Op], outputs: tuple[int, ...]) -> Op:
    made = {t for op in ops for t in op.outputs}
    inputs = tuple(dict.fromkeys(t for op in ops for t in op.inputs if t not in made))
    return Op(id=-1, name=name, inputs=inputs, outputs=outputs)


def _cost(graph: Graph, costs: Costs, ops: list[Op]) -> tuple[int, int]:
    """Time of the ops, launched for each slice; bytes of a slice at most, in the order of the ops."""
    time_ns = sum(costs.op_time_ns[op.id] for op in ops) + len(ops) * (_NUM_SLICES - 1) * _LAUNCH_NS
    last_read = {graph.storage_of(t): k for k, op in enumerate(ops) for t in op.inputs}
    held: set[int] = set()
    peak = 0
    for k, op in enumerate(ops):
        held |= {graph.storage_of(t) for t in op.outputs}
        peak = max(peak, sum(graph.storages[s].size_bytes for s in held) + costs.workspace_bytes[op.id])
        held -= {s for s in held if last_read.get(s, k) <= k}
    return time_ns, -(-peak // _NUM_SLICES)


def recorded(path: Path, rows: Path, seconds: float) -> Iterator[dict[str, Any]]:
    model = path.stem
    ((graph, costs), *_) = pickle.loads(path.read_bytes())
    peer_ms = min(r["ms"] for r in records(rows) if r["model"] == model and r["what"] in ("compile", "compile again"))
    full = peaks_before(rows, model, "compile")[-1]
    budgets = [
        *((f"{share:.0%}", int(full * share)) for share in SHARES),
        ("a third of eager", peaks_before(rows, model, "eager")[-1] // 3),
    ]
    yield from compared(model, "recorded", graph, costs, list(recorded_forms(graph, costs)), budgets, seconds, peer_ms)


# -- estimated costs ---------------------------------------------------------------------------------------------------


def estimated(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Through capture and the pass itself."""
    from memfit.capture.inputs import Call
    from memfit.compilers.inductor.compiler import Inductor
    from memfit.passes.regions.regions import gather_regions
    from memfit.passes.slicing.slice_blocks import slice_blocks
    from memfit.pipeline.capture import capture
    from memfit.profile.roofline import roofline

    peer = PEERS[name]
    inputs, targets = peer.data("cpu", 1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=peer.autocast):
        fine = capture(
            peer.model("cpu"),
            Call.flatten((*inputs, *targets), {}),
            loss_fn=peer.loss,
            num_targets=len(targets),
            gpu_attention=True,
            compiler=Inductor(),
        )
    whole = gather_regions(fine, Inductor())
    forms = []
    for sliced in slice_blocks(fine, Inductor()):
        coarse = gather_regions(sliced, Inductor())
        (op,) = (op for op in coarse.graph.ops if op.name.startswith("memfit.sliced_forward"))
        shapes = [tuple(s.shape) for t in op.outputs if (s := coarse.samples[t]) is not None]
        forms.append(Form(ends=str(shapes), graph=coarse.graph, costs=roofline(coarse, "h200")))
    costs = roofline(whole, "h200")
    peak = plan(whole.graph, costs, None, planner="keep_all").require_plan().timeline.peak_bytes
    budgets = [(f"{share:.0%}", int(peak * share)) for share in SHARES if forms or share == min(SHARES)]
    yield from compared(name, "estimated", whole.graph, costs, forms, budgets, seconds, None)


# -- both --------------------------------------------------------------------------------------------------------------


def compared(
    model: str,
    kind: str,
    graph: Graph,
    costs: Costs,
    forms: list[Form],
    budgets: list[tuple[str, int]],
    seconds: float,
    peer_ms: float | None,
) -> Iterator[dict[str, Any]]:
    keep_all_ns = plan(graph, costs, None, planner="keep_all").require_plan().timeline.time_ns
    for label, budget in budgets:
        limit = budget - max(2 * 2**20, budget // 200)  # as memfit.fit leaves to the allocator
        usual = plan(graph, costs, limit, time_limit_s=seconds)
        tried = [(form, plan(form.graph, form.costs, limit, time_limit_s=seconds)) for form in forms]
        found = [(form, outcome.plan) for form, outcome in tried if outcome.plan is not None]
        best = min(found, key=lambda entry: entry[1].timeline.time_ns, default=None)
        time_ns = None if best is None else best[1].timeline.time_ns
        row = {
            "model": model,
            "costs": kind,
            "budget": label,
            "GiB": round(budget / 2**30, 2),
            "budget_bytes": budget,
            "keep_all_ms": keep_all_ns / 1e6,
            "whole ops": _shown(usual),
            "whole_status": usual.status.name,
            "whole_minimum_bytes": usual.lower_bound_bytes,
            "in slices": "nothing to slice" if not forms else "no plan" if time_ns is None else f"{time_ns / 1e6:.1f}",
            "slices, x keep all": "" if time_ns is None else f"{time_ns / keep_all_ns:.3f}",
            "slices, x torch.compile": "" if time_ns is None or peer_ms is None else f"{time_ns / 1e6 / peer_ms:.3f}",
            "block ends after": "" if best is None else best[0].ends,
            "found": len(forms),
            "each": [
                {"ends": form.ends, "status": o.status.name, "ms": o.plan.timeline.time_ns / 1e6 if o.plan else None} for form, o in tried
            ],
        }
        print({k: row[k] for k in COLUMNS}, file=sys.stderr, flush=True)
        yield row


def _shown(outcome: Any) -> str:
    if outcome.plan is not None:
        return f"{outcome.plan.timeline.time_ns / 1e6:.1f}"
    return "infeasible" if outcome.status is Status.INFEASIBLE else "no plan"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", type=Path, help="MODEL.pickle of compiled.py measure --keep")
    parser.add_argument("--rows", type=Path, help="JSON lines of compiled.py measure, for --recorded")
    parser.add_argument("--models", default="vgg16,resnet50,unet,vit_l", help="traced and estimated")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each plan")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(recorded(args.recorded, args.rows, args.seconds)) if args.recorded else []
    for name in filter(None, args.models.split(",")):
        rows += estimated(name, args.seconds)
    write_results(
        "sliced_blocks",
        title="The first block of a network in slices of the batch",
        text=_TEXT,
        columns=COLUMNS,
        rows=rows,
        run=provenance(0, ("torch", "numpy")),
    )
