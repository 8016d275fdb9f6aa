"""The planner with operator variants on captured models: what in-place, bits, slices and chunked losses save at each budget."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.lib.results import provenance, write_results
from benchmarks.models.peers import PEERS, Peer
from benchmarks.parts.planning.models import SHARES
from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.passes.interface import Context, Numbers
from memfit.passes.run import offer_choices
from memfit.passes.step.chunked_loss import chunk_loss
from memfit.passes.variants.convolution_slices import slice_convolutions
from memfit.pipeline.capture import capture
from memfit.planning import plan
from memfit.planning.model.fast_judge import peak_and_time
from memfit.planning.model.reduce import build_model
from memfit.profile.roofline import roofline

MODELS = ("resnet50", "googlenet", "unet", "vgg16", "mobilenet_v2", "gpt2")
COLUMNS = ("model", "forms_of_step", "variants", "forms", "budget", "status", "overhead_points", "bound_points", "gap_points", "seconds")
_TEXT = (
    "Captured on fake tensors, roofline H200 costs. Budgets are shares of the plain step's keep-all peak above what the caller holds, and "
    "overheads are against the plain step's time, so rows of one budget can be compared. `none`: the plain step. `same bits`: in-place "
    "forms, packed masks, narrow indices, statistics. `chunked loss` and `sliced convolutions`: the step rewritten that way, with variants that "
    "round otherwise too. INFEASIBLE is proven; other work shared the two cores."
)


def forms_of(peer: Peer) -> Iterator[tuple[str, Captured]]:
    """The step as captured, and with what the planner may choose between."""
    model, inputs = peer.build(), peer.inputs("cpu", 1.0)
    targets = peer.targets("cpu", 1.0) or inputs
    context = torch.autocast("cpu", torch.bfloat16) if peer.autocast else contextlib.nullcontext()
    with context:
        plain = capture(model, Call.flatten((*inputs, *targets), {}), loss_fn=peer.loss, num_targets=len(targets))
    yield "none", plain
    seen = {plain.graph.digest}
    rewritten = (
        ("same bits", plain, False),
        ("chunked loss", chunk_loss(plain), True),
        ("sliced convolutions", slice_convolutions(plain), True),
    )
    for name, captured, rounding in rewritten:
        numbers = frozenset(Numbers) if rounding else frozenset({Numbers.SAME_BITS})
        offer = None if captured is None else offer_choices(captured, "eager", Context(), numbers=numbers)
        if offer is not None and offer.graph.digest not in seen:
            seen.add(offer.graph.digest)
            yield name, offer


def rows_of(peer: Peer, seconds: float) -> Iterator[dict[str, Any]]:
    limits: list[tuple[str, int]] = []
    base_time = num_forms = 0
    for name, captured in forms_of(peer):
        costs = roofline(captured, "h200")
        model = build_model(captured.graph, costs)
        if name == "none":
            a = model.arrays
            peak, base_time = peak_and_time(a, np.array(model.agenda, np.int64))
            held = int(a.base_bytes + a.size[a.source].sum())
            limits = [(f"{share:.0%}", int(held + share * (peak - held))) for share in SHARES]
            num_forms = model.num_forms
        for label, limit in limits:
            outcome = plan(captured.graph, costs, limit, time_limit_s=seconds)
            points = lambda time: round(100 * (time / base_time - 1), 2)  # noqa: B023, E731
            overhead = points(outcome.plan.timeline.time_ns) if outcome.plan else ""
            bound = points(outcome.lower_bound_ns) if outcome.plan else ""
            yield {
                "model": peer.name,
                "forms_of_step": num_forms,
                "variants": name,
                "forms": model.num_forms,
                "budget": label,
                "status": str(outcome.status),
                "overhead_points": overhead,
                "bound_points": bound,
                "gap_points": round(overhead - bound, 2) if outcome.plan else "",
                "seconds": round(outcome.seconds, 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(PEERS)}; the six of the planner's table without")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit for each plan")
    options = parser.parse_args()
    rows = []
    for name in options.models or MODELS:
        for found in rows_of(PEERS[name], options.seconds):
            print(found, file=sys.stderr, flush=True)
            rows.append(found)
    write_results(
        "planning_variants",
        title="Planner: operator variants on captured models",
        text=_TEXT,
        columns=COLUMNS,
        rows=sorted(
            rows, key=lambda row: (MODELS.index(row["model"]) if row["model"] in MODELS else len(MODELS), -int(row["budget"][:-1]))
        ),
        run=provenance(0, ("numpy", "scipy", "numba", "torch")),
    )
