"""Convolution algorithms on a GPU: time and workspace of PyTorch's own choice and of every other algorithm of cuDNN, for the peers' layers.

    python benchmarks/compiled.py convolutions --output rows.jsonl          about 50 s on an H200
    python benchmarks/compiled.py convolutions --read rows.jsonl            the table again, on any machine

A row is one pass (forward, gradient of the input, gradient of the weight) of one distinct layer by one algorithm. Rows are
written as they come; `--seconds` stops early and says what was left out. `error` is the largest difference from PyTorch's result
over its largest value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.results import provenance, read_results, write_results
from benchmarks.lib.tables import WORTH_SHOWING_MIB
from benchmarks.models.peers import PEERS, Peer
from memfit.capture.captured import OpCall, Role
from memfit.capture.inputs import Call
from memfit.kernels.cudnn import Algorithm, Convolution, CudnnError, Direction, Library, library, strides_of
from memfit.passes.rewriter import Rewriter
from memfit.passes.variants.convolution_algorithms import CONVOLUTIONS, choices, describe
from memfit.pipeline.capture import capture
from memfit.torch_private.allocations import peaks_of

aten = torch.ops.aten
MODELS = "unet,vgg16,resnet50,googlenet"
COLUMNS = ("model", "layout", "layer", "pass", "algorithm", "time_ms", "workspace_mib", "offered", "error")
_RUNS = 5
_MOST_WORKSPACE = 16 * 2**30
_SLOW = 8  # times PyTorch's time: not measured again
_TEXT = (
    "fp32 with TF32, the batch sizes of `benchmarks/models/peers.py`; layers whose largest tensor is at least 1/400 of the step's bytes, "
    "each distinct one once, all operands dense. `pytorch` is the algorithm PyTorch picks (workspace as its allocator saw it); the others are "
    "cuDNN's, in the order cuDNN expects them to be fast; a star marks those that are not deterministic. "
    "`error` is against PyTorch's result: 0 means the same bits. "
    f"Shown are passes in which PyTorch takes {WORTH_SHOWING_MIB} MiB or more; all are in the raw rows. cuDNN's older interface takes some 0.1 ms of the "
    "processor for each call, which a short kernel does not hide. `offered` is what memfit offered when this was run; it no longer offers the first of "
    "the list, which is PyTorch's own."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--layout", choices=("channels_last", "contiguous"), default="channels_last")
    parser.add_argument("--scale", type=float, default=1.0, help="batch size factor")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    parser.add_argument("--seconds", type=float, default=55.0, help="start nothing new after this long")
    parser.add_argument("--read", type=Path, help="make the result page from these rows")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if args.read is not None:
        write_page(read_results(args.read)[1])
        return
    cudnn = library()
    if cudnn is None:
        sys.exit("There is no cuDNN with the interface this needs: run it on a machine with an NVIDIA GPU.")
    print(f"cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}, {torch.cuda.get_device_name()}", file=sys.stderr)
    end = time.perf_counter() + args.seconds
    facts = run_facts()
    for name in args.models.split(","):
        peer = replace(PEERS[name], channels_last=args.layout == "channels_last")
        for row in rows_of(peer, args.scale, end, cudnn, "cuda"):
            row = {"layout": args.layout, **row}
            print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
            if args.output is not None:
                with args.output.open("a") as file:
                    file.write(json.dumps({**facts, **row}) + "\n")


def run_facts() -> dict[str, str]:
    return {**provenance(0, ("torch",)), "cudnn": str(torch.backends.cudnn.version()), "device": torch.cuda.get_device_name()}


def write_page(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["command"] = " ".join(Path(word).name if word.startswith("/") else word for word in row["command"].split())
    write_results(
        "convolution_algorithms",
        title="Convolution algorithms",
        text=_TEXT,
        columns=COLUMNS,
        rows=rows,
        run={},
        hardware="h200",
        table="convolutions",
    )


def rows_of(peer: Peer, scale: float, end: float, cudnn: Library, device: str) -> Iterator[dict[str, Any]]:
    """Every distinct layer and pass of a model, the layers with the largest tensors first."""
    rewriter, calls = calls_of(peer, scale, device)
    listing_s = 0.0
    for position, (layer, call) in enumerate(calls):
        if time.perf_counter() > end:
            print(f"{peer.name}: time is up, {len(calls) - position} of {len(calls)} layers left out", file=sys.stderr)
            return
        begin = time.perf_counter()
        offered = {(p, a.number) for choice in choices(rewriter, call) for p, a in choice.algorithms}
        listing_s += time.perf_counter() - begin
        backward = call.target is aten.convolution_backward.default
        transposed = call.args[7 if backward else 6]
        for which in passes_of(call, transposed):
            for row in measured_rows(cudnn, layer, which, transposed, call, offered, device):
                yield {"model": peer.name, "layer": text_of(layer, transposed), "pass": which.value, **row}
    print(f"{peer.name}: asking cuDNN about {len(calls)} layers took {listing_s:.2f} s", file=sys.stderr)


def calls_of(peer: Peer, scale: float, device: str) -> tuple[Rewriter, list[tuple[Convolution, OpCall]]]:
    model = peer.model(device)
    inputs, targets = peer.data(device, scale)
    captured = capture(model, Call.flatten((*inputs, *targets), {}), loss_fn=peer.loss, num_targets=len(targets))
    total = sum(s.size_bytes for s in captured.graph.storages)
    rewriter = Rewriter(captured, least_bytes=max(1, total // 400))
    found: dict[tuple[Any, Convolution], OpCall] = {}
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        if call.role is Role.CALL and call.target in CONVOLUTIONS and any(rewriter.is_large(t) for t in (*op.inputs, *op.outputs)):
            layer = describe(rewriter, call, "cuda")
            if layer is not None:
                found.setdefault((call.target, layer), call)
    return rewriter, sorted(((layer, call) for (_, layer), call in found.items()), key=lambda pair: -pair[0].size_bytes)


def passes_of(call: OpCall, transposed: bool) -> list[Direction]:
    if call.target is aten.convolution.default:
        return [Direction.DATA if transposed else Direction.FORWARD]
    wanted = call.args[10]
    return [
        p for p, is_wanted in ((Direction.FORWARD if transposed else Direction.DATA, wanted[0]), (Direction.FILTER, wanted[1])) if is_wanted
    ]


def text_of(layer: Convolution, transposed: bool) -> str:
    name = "x".join(map(str, layer.input)) + " by " + "x".join(map(str, layer.weight))
    part = " of a concatenation" if layer.input_strides or layer.output_strides else ""
    return f"{name} stride {layer.stride[0]}" + (" transposed" if transposed else "") + part


def measured_rows(
    cudnn: Library, layer: Convolution, which: Direction, transposed: bool, call: OpCall, offered: set[Any], device: str
) -> Iterator[dict[str, Any]]:
    first, second, result, plain = setting_of(layer, which, transposed, call, device)
    expected = plain()
    kept, peak = peaks_of(plain, torch.device(device))
    own_ms = milliseconds(plain, device)
    yield {"algorithm": "pytorch", **_costs(own_ms, peak - kept), "offered": "", "error": 0.0}
    try:
        algorithms = cudnn.algorithms(layer, which)
    except CudnnError as error:
        yield {"algorithm": "none", **_costs(None, 0), "offered": "no", "error": str(error)}
        return
    for algorithm in algorithms:
        text = f"{algorithm.number}{'' if algorithm.deterministic else '*'} (math {algorithm.math})"
        told = {"algorithm": text, "offered": "yes" if (which, algorithm.number) in offered else "no"}
        if algorithm.workspace_bytes > _MOST_WORKSPACE:
            yield {**told, **_costs(None, algorithm.workspace_bytes), "error": "not run"}
            continue
        try:
            yield {**told, **one_algorithm(cudnn, layer, which, algorithm, (first, second, result), expected, own_ms)}
        except (CudnnError, torch.OutOfMemoryError) as error:
            yield {**told, **_costs(None, algorithm.workspace_bytes), "error": str(error)}


def one_algorithm(
    cudnn: Library,
    layer: Convolution,
    which: Direction,
    algorithm: Algorithm,
    tensors: tuple[torch.Tensor, ...],
    expected: Any,
    own_ms: float,
) -> dict[str, Any]:
    first, second, result = tensors
    device = result.device.type
    result.fill_(float("nan"))

    def run() -> None:
        cudnn.run(layer, which, algorithm, first, second, result)

    once_ms = milliseconds(run, device, runs=1)
    error = float((result - expected).abs().max() / expected.abs().max())
    kept, peak = peaks_of(run, result.device)
    time_ms = once_ms if once_ms > _SLOW * own_ms + 1 else milliseconds(run, device)
    return {**_costs(time_ms, peak - kept), "error": float(f"{error:.2g}")}


def _costs(time_ms: float | None, workspace_bytes: int) -> dict[str, Any]:
    return {"time_ms": "" if time_ms is None else round(time_ms, 4), "workspace_mib": round(workspace_bytes / 2**20, 2)}


def setting_of(
    layer: Convolution, which: Direction, transposed: bool, call: OpCall, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """(first, second, result) for cuDNN, and the same by PyTorch."""

    def made(shape: tuple[int, ...], strides: tuple[int, ...] = ()) -> torch.Tensor:
        strides = strides or strides_of(shape, channels_last=layer.channels_last)
        return torch.empty_strided(shape, strides, dtype=layer.dtype, device=device).normal_()

    big, weight, small = made(layer.input, layer.input_strides), made(layer.weight), made(layer.output, layer.output_strides)
    near, far = (small, big) if transposed else (big, small)  # the layer's own input and output
    settings = call.args[4:10] if call.target is aten.convolution_backward.default else call.args[3:9]
    if call.target is aten.convolution.default:
        order = (weight, small, big) if which is Direction.DATA else (big, weight, small)
        return *order, lambda: aten.convolution.default(near, weight, None, *settings)
    index = 1 if which is Direction.FILTER else 0
    mask = [index == 0, index == 1, False]
    order = {Direction.FILTER: (big, small, weight), Direction.DATA: (weight, small, big), Direction.FORWARD: (big, weight, small)}[which]
    out = made(tuple(order[2].shape))
    return order[0], order[1], out, lambda: aten.convolution_backward.default(far, near, weight, [0], *settings, mask)[index]


def milliseconds(run: Callable[[], Any], device: str, runs: int = _RUNS) -> float:
    times = []
    for _ in range(runs):
        if device != "cuda":
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
            continue
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # launches queue up behind it, so that Python's time is not counted
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)
