"""Plans at the peaks of PyTorch's min-cut + knapsack, of √n segments and of per-block checkpointing: overhead at equal peak, one judge."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.lib.pages import write_pages
from benchmarks.lib.results import path_of, provenance, read_results, save_results
from benchmarks.models.peers import PEERS, _is_block
from benchmarks.models.zoo import ZOO, make
from memfit.capture.captured import Captured, Role
from memfit.capture.inputs import Call, Inputs
from memfit.capture.lower.lower import Setting, _Lowering
from memfit.capture.trace.joint_graph import Joint, trace
from memfit.core.plan import Timeline
from memfit.core.simulate import simulate
from memfit.passes.fx.cudnn_batch_norm import use_cudnn_batch_norm
from memfit.planning import plan
from memfit.planning.baselines.sqrt_segments import bytes_made, segments_sequence
from memfit.planning.cuts.just_in_time import keep_at, turning_point
from memfit.planning.model.fast_judge import usage_of
from memfit.planning.model.reduce import Ints, Model, build_model
from memfit.planning.model.to_schedule import schedule_of
from memfit.profile.roofline import roofline

MEMORY_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
PATH = path_of("against_torch")
_NOISE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A traced step: torch's joint graph, ours, and which of our storages a node of torch's lives in."""

    name: str
    module: torch.fx.GraphModule
    captured: Captured
    model: Model
    storage_of: dict[str, int]
    blocks: tuple[str, ...]
    begins: int  # position on the agenda where backward begins


# -- capturing ---------------------------------------------------------------------------------------------------------


def subject(name: str) -> Subject:
    """A model of the matrix by its name, or one of the published comparisons as `peer:NAME`."""
    if name.startswith("peer:"):
        peer = PEERS[name.removeprefix("peer:")]
        network, inputs = peer.build().train(), peer.inputs("cpu", 1.0)
        targets = peer.targets("cpu", 1.0) or inputs
        blocks = tuple(n for n, m in network.named_modules() if _is_block(n, m, peer.blocks))
        if peer.blocks == ("pool-blocks",):
            blocks = ()
        context: Any = torch.autocast("cpu", torch.bfloat16, enabled=peer.autocast)
        return _captured(name, network, Inputs.of(inputs), peer.loss, targets, blocks or blocks_of(network), context)
    network, inputs, loss, targets = make(name)
    return _captured(name, network, Inputs.of(inputs), loss, tuple(targets), blocks_of(network), contextlib.nullcontext())


def _captured(
    name: str, network: nn.Module, inputs: Inputs, loss: Callable[..., Any], targets: tuple[Any, ...], blocks: tuple[str, ...], context: Any
) -> Subject:
    call = Call.flatten((*inputs.args, *targets), inputs.kwargs)
    with context:
        joint: Joint = trace(network, call, loss_fn=loss, num_targets=len(targets))
    use_cudnn_batch_norm(joint.module)
    sources = (*network.parameters(), *network.buffers(), *call.tensors)
    lowering = _Lowering(joint, Setting(sources=sources, names=[str(k) for k in range(len(sources))], accumulates=False))
    for node in joint.module.graph.nodes:
        lowering.visit(node)
    captured = lowering.finish()
    model = build_model(captured.graph, roofline(captured, "h200"))
    storages = {node.name: captured.graph.storage_of(value) for node, value in lowering.value_of.items() if isinstance(value, int)}
    begins = next(c for c, call_ in enumerate(captured.calls) if call_.role is Role.BACKWARD_BEGINS)
    position = next(i for i, f in enumerate(model.agenda) if model.forms[f][0] >= begins)
    return Subject(name=name, module=joint.module, captured=captured, model=model, storage_of=storages, blocks=blocks, begins=position)


def blocks_of(network: nn.Module) -> tuple[str, ...]:
    """What a practitioner would checkpoint: the outermost composite elements of module lists and sequences."""
    found: list[str] = []
    for name, module in network.named_modules():
        if any(name.startswith(f + ".") for f in found):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential):
            parts = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children()]
            composite = [n for n, m in parts if any(True for _ in m.children()) and not isinstance(m, nn.Sequential | nn.ModuleList)]
            found += composite if len(composite) > 1 else []
    return tuple(found)


# -- the others' schedules, as sequences of our forms --------------------------------------------------------------------


def min_cut(s: Subject, memory_budget: float) -> Ints:
    """What PyTorch saves at this memory budget, kept where backward begins; all else is recomputed as late as can be."""
    num_outputs = sum(type(d).__name__ in ("PlainAOTOutput", "InputMutationAOTOutput") for d in _output(s.module).meta["desc"])
    module = copy.deepcopy(s.module)
    inputs = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    with (
        functorch_config.patch({"activation_memory_budget": memory_budget}),
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
    ):
        forward, _ = min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=num_outputs)
    saved = _output(forward).args[0][num_outputs:]
    unknown = [n.name for n in saved if n.name not in s.storage_of]
    assert not unknown, f"{s.name}: nodes that the capture does not have: {unknown[:3]}"
    return keep_at(s.model, [s.begins], [{s.storage_of[n.name] for n in saved}])


def _output(module: torch.fx.GraphModule) -> torch.fx.Node:
    return next(n for n in reversed(module.graph.nodes) if n.op == "output")


def per_block(s: Subject) -> Ints | None:
    """Keep what crosses a block's border and everything outside blocks: torch.utils.checkpoint on each block."""
    if not s.blocks:
        return None
    model = s.model

    def block(form: int) -> str | None:
        path = model.graph.ops[model.forms[form][0]].where.split(",")[0].strip()
        return next((n for n in s.blocks if path == n or path.startswith(n + ".")), None)

    home: dict[int, str | None] = {}
    keep: set[int] = set()
    for f in model.agenda[: s.begins]:
        here = block(f)
        keep.update(x for x in model.ins[f] if x in home and home[x] != here)
        for x in model.outs[f]:
            home[x] = here
    keep.update(x for x, here in home.items() if here is None)
    return keep_at(model, [s.begins], [keep])


def others(s: Subject) -> Iterator[tuple[str, Ints]]:
    """Every other method's sequence; those that say the same as one before are left out."""
    seen: set[bytes] = set()

    def is_new(sequence: Ints) -> bool:
        key = np.asarray(sequence, np.int64).tobytes()
        known = key in seen
        seen.add(key)
        return not known

    for budget in MEMORY_BUDGETS:
        sequence = min_cut(s, budget)
        if is_new(sequence):
            yield f"min-cut, memory budget {budget}", sequence
    turn = turning_point(s.model, usage_of(s.model.arrays, np.array(s.model.agenda, np.int64)))
    for weights, what in ((np.ones(turn + 1), "ops"), (bytes_made(s.model, turn), "bytes")):
        sequence = segments_sequence(s.model, turn, weights, max(2, isqrt(turn + 1)))
        if is_new(sequence):
            yield f"√n segments by {what}", sequence
    blocks = per_block(s)
    if blocks is not None and is_new(blocks):
        yield f"per block ({len(s.blocks)})", blocks


# -- the comparison ------------------------------------------------------------------------------------------------------


def judged(s: Subject, sequence: Ints) -> Timeline:
    return simulate(s.captured.graph, schedule_of(s.model, sequence), s.model.costs)


def rows_of(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    s = subject(name)
    whole = judged(s, np.array(s.model.agenda, np.int64))
    base = whole.time_ns
    for method, sequence in others(s):
        theirs = judged(s, sequence)
        outcome = plan(s.captured.graph, s.model.costs, theirs.peak_bytes, time_limit_s=seconds)
        ours = outcome.plan.timeline if outcome.plan is not None else None
        yield {
            "model": name,
            "ops": len(s.captured.graph.ops),
            "method": method,
            "peak": f"{theirs.peak_bytes / whole.peak_bytes:.1%}",
            "theirs": round(100 * (theirs.time_ns / base - 1), 3),
            "memfit": "" if ours is None else round(100 * (ours.time_ns / base - 1), 3),
            "bound": round(100 * (outcome.lower_bound_ns / base - 1), 3),
            "seconds": round(outcome.seconds, 2),
            "verdict": verdict(ours, theirs),
            "status": str(outcome.status),
            "peak_bytes": theirs.peak_bytes,
            "keep_all_peak_bytes": whole.peak_bytes,
            "memfit_peak_bytes": ours.peak_bytes if ours is not None else None,
        }


def verdict(ours: Timeline | None, theirs: Timeline) -> str:
    if ours is None:
        return "LOST: no plan"
    ratio = ours.time_ns / theirs.time_ns - 1
    return "LOST" if ratio > _NOISE else "faster" if ratio < -_NOISE else "equal"


COLUMNS = ("model", "ops", "method", "peak", "theirs", "memfit", "bound", "seconds", "verdict")
TEXT = """\
Each row takes another method's schedule, judges its peak, and plans at exactly that peak (`planner="auto"`, no operator variants, so that both run the
same kernels). `theirs`, `memfit` and `bound` are percent of op time over the plain step (roofline H200 costs on the CPU's graph); one judge for both.
`peer:` models are the published ones at their batch sizes, the others the model matrix.

- **min-cut**: `torch._functorch.partitioners.min_cut_rematerialization_partition` on the very graph that was captured, with
  `activation_memory_budget` swept (the knapsack); what it saves is kept where backward begins, the rest recomputed as late as can be, which is kinder
  than its own backward graph. Budgets that give the same schedule appear once.
- **√n segments** (Chen et al.), cut evenly by ops and by bytes; **per block**: torch.utils.checkpoint on every composite element of the model's lists.

Every model in one run, with one time limit for each plan, on two cores shared with other work."""
ABOUT = {"title": "At equal peak: min-cut + knapsack, √n, per block", "text": TEXT, "table": "against_torch", "columns": COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names of the zoo, or peer:NAME; all without")
    parser.add_argument("--seconds", type=float, default=8.0, help="time limit for each plan")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, known = read_results(PATH)
    run = provenance(0, ("torch", "numpy", "scipy", "numba"))  # once: the code that runs is that of now
    everything = [*ZOO, *(f"peer:{n}" for n in PEERS)]
    for name in options.models or everything:
        fresh = []
        for found in rows_of(name, options.seconds):
            print(" | ".join(str(found[c]) for c in COLUMNS), file=sys.stderr, flush=True)
            fresh.append({**found, **run})
        known = [r for r in known if r["model"] != name] + fresh
        save_results(PATH, ABOUT, known)
    save_results(PATH, ABOUT, sorted(known, key=lambda r: everything.index(r["model"])))
    write_pages()
