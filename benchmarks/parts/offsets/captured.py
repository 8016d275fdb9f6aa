"""Layouts of training steps: ResNet-50, UNet and GPT-2, captured and as recorded on an H200 with every workspace, against the load."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from benchmarks.lib.results import FOLDER, provenance, read_results, write_results
from benchmarks.parts.offsets.published import inductor_greedy, tflite_greedy
from memfit.core.graph import Graph
from memfit.core.io import load, save
from memfit.core.lifetimes import SCRATCH, Lifetime, lifetimes, max_load
from memfit.core.units import format_bytes
from memfit.offsets import buffers_of, layout_of, layout_plan, tight_layout
from memfit.planning import plan

NAMES = ("resnet50", "unet", "gpt2")
FRACTIONS = (1.0, 0.7, 0.5)


def graph_of(name: str, folder: Path) -> Graph:
    """The captured step at the batch size of the published comparisons; kept in `folder`, since capturing takes longest."""
    path = folder / f"{name}.graph.json"
    if not path.exists():
        save(_captured(name), path)
    return cast(Graph, load(path, Graph))


def _captured(name: str) -> Graph:
    import torch

    from benchmarks.models.peers import PEERS
    from memfit.capture.inputs import Call
    from memfit.pipeline.capture import capture

    peer = PEERS[name]
    model, inputs = peer.build().train(), peer.inputs("cpu", 1.0)
    targets = peer.targets("cpu", 1.0) or inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=peer.autocast):
        return capture(model, Call.flatten((*inputs, *targets), {}), loss_fn=peer.loss, num_targets=len(targets)).graph


def measure(name: str, graph: Graph) -> Iterator[dict[str, Any]]:
    whole = plan(graph, planner="keep_all").require_plan()
    for fraction in FRACTIONS:
        outcome = plan(graph, None, int(whole.timeline.peak_bytes * fraction), time_limit_s=5)
        if outcome.plan is None:
            yield {
                "step": name,
                "budget": f"{fraction:.0%} of keep-all",
                "allocations": str(outcome.status),
                **dict.fromkeys(COLUMNS[3:-1], ""),
            }
            continue
        schedule = outcome.plan.schedule
        items = lifetimes(graph, schedule)
        peak = max_load(items)
        buffers = [b for b in buffers_of(items) if not b.is_empty]
        began = time.perf_counter()
        layout = layout_plan(graph, schedule, time_limit_s=10)
        seconds = time.perf_counter() - began
        assert outcome.plan.layout is not None
        values = (
            format_bytes(peak),
            f"{layout.height_bytes / peak:.4f}",
            f"{seconds:.2f}",
            f"{outcome.plan.layout.height_bytes / peak:.4f}",
            *(f"{max(o + b.size for o, b in zip(f(buffers), buffers, strict=True)) / peak:.4f}" for f in (tflite_greedy, inductor_greedy)),
        )
        row = {"step": name, "budget": f"{fraction:.0%} of keep-all", "allocations": len(items)}
        yield {**row, **dict(zip(COLUMNS[3:-1], values, strict=True))}


RECORDED = FOLDER / "recorded_steps_h200_202611.jsonl"


def measure_recorded() -> Iterator[dict[str, Any]]:
    """Steps as the allocator saw them on an H200: what the graph knows, library workspaces and op-internal temporaries."""
    for record in read_results(RECORDED)[1]:
        items = [Lifetime(storage=SCRATCH, start=a, stop=b, size_bytes=size) for size, a, b in record["size_start_stop"]]
        peak = max_load(items)
        buffers = [b for b in buffers_of(items) if not b.is_empty]
        began = time.perf_counter()
        layout = layout_of(items, time_limit_s=10)
        seconds = time.perf_counter() - began
        values = (
            format_bytes(peak),
            f"{layout.height_bytes / peak:.4f}",
            f"{seconds:.2f}",
            f"{tight_layout(items).height_bytes / peak:.4f}",
            *(f"{max(o + b.size for o, b in zip(f(buffers), buffers, strict=True)) / peak:.4f}" for f in (tflite_greedy, inductor_greedy)),
        )
        row = {"step": f"{record['model']}, recorded", "budget": f"{record['share']:.0%} of keep-all", "allocations": len(items)}
        yield {**row, **dict(zip(COLUMNS[3:-1], values, strict=True))}


COLUMNS = (
    "step", "budget", "allocations", "maximum load", "layout_plan / load", "seconds", "attached by plan / load", "TFLite / load",
    "Inductor / load", "load",
)  # fmt: skip

TEXT = """\
The allocations of one training step (parameters and inputs are the caller's), captured on fake CPU tensors at the batch sizes of the published
comparisons, with every op as dear as another, kept whole and planned to a share of the keep-all peak. *Recorded* steps are what the allocator
was asked for on an H200 (torch 2.11, `benchmarks/eager.py reserved --record`, raw rows in `recorded_steps_h200_202611.jsonl`): every cuDNN and cuBLAS
workspace and op-internal temporary is a buffer too. Height over the maximum load; the solver has 10 s. Two cores shared with other work
(load average in the rows' `load`): an idle machine needs a quarter to a half of these seconds."""


def _told(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        row = {**row, "load": f"{os.getloadavg()[0]:.1f}"}
        print(" | ".join(str(v) for v in row.values()), file=sys.stderr, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path, default=Path("out"), help="folder in which captured graphs are kept")
    options = parser.parse_args()
    options.graphs.mkdir(exist_ok=True)
    rows = []
    for name in NAMES:
        rows += _told(measure(name, graph_of(name, options.graphs)))
    rows += _told(measure_recorded())
    run = provenance(0, ("numpy", "numba", "torch"))
    write_results("offsets_captured", title="Layouts of captured training steps", text=TEXT, columns=COLUMNS, rows=rows, run=run)
