"""What `compiled.py measure` measures of one model. Here: torch.compile and eager, with and without checkpoints or a memory budget.

Every row is yielded as soon as it is measured. Whatever is timed holds a lock on the GPU; compiling does not.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.lib.gpu import gradients, synchronize
from benchmarks.lib.measuring import Rows, distances, exact_gradients, gpu, held, loss_of, quietly, step_of
from benchmarks.lib.replays import replayed
from benchmarks.models.peers import Peer, checkpoint_blocks
from benchmarks.parts.compiled.gradient_rows import compared
from benchmarks.parts.compiled.memfit_rows import planned, reserved, started, with_optimizer

# memfit.fit to the first step, cold; in another process, with what that left on disk; likewise reserved bytes, in a planned arena or not
STARTS = ("start", "start again", "reserved", "reserved caching")


def rows(peer: Peer, part: str, device: str, args: argparse.Namespace) -> Rows:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = peer.model(device)
    inputs, targets = peer.data(device, args.scale)
    if part == "memfit":
        yield from planned(peer, model, inputs, targets, device, args)
        return
    if part.startswith("reserved"):
        yield reserved(peer, model, inputs, targets, device, args)
        return
    if part in STARTS:
        yield started(peer, model, inputs, targets, device, args)
        return
    if part == "gradients":
        yield from compared(peer, model, device, args.plan_seconds)
        return
    if part == "adamw":
        yield from with_optimizer(peer, model, inputs, targets, device, args.plan_seconds)
        return
    if part.endswith("checkpoint"):
        checkpoint_blocks(model, peer.blocks)
    if part.startswith("budget"):
        torch._functorch.config.activation_memory_budget = float(part.split()[1])
    forward = loss_of(peer, model) if part.startswith("eager") else torch.compile(loss_of(peer, model), dynamic=False)
    step = step_of(peer, device, lambda: forward(inputs, targets))
    begin = time.perf_counter()
    step()
    synchronize(device)
    first_s = time.perf_counter() - begin
    with gpu():
        result = quietly(step, model, device, held(model, inputs, targets))
        if part in ("compile", "eager"):
            exact = exact_gradients(peer, model, inputs, targets, device)
            result |= {"from_fp64": None if exact is None else distances(exact, gradients(step, model))}
        yield {"what": part, "cold_s": first_s, **result}
        if args.replay and part.startswith("compile"):
            yield {"what": f"{part}, replayed", **replayed(step, model, held(model, inputs, targets))}
