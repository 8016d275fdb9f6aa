"""How `compiled.py measure` measures: alone on the GPU, until it is quiet, against exact gradients; and what earlier rows say."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lib.gpu import gradients, timed
from benchmarks.lib.replays import issued_ms
from benchmarks.lib.results import read_results
from benchmarks.models.peers import Peer

TRIES = 3
_QUIET = 1.03  # median over fastest step: above it somebody else was at work, and the steps are timed again
_LARGE = 2 * 10**8  # parameters from which on an fp64 twin is left out
Rows = Iterator[dict[str, Any]]


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Alone on the GPU, and on the processors: whatever else this benchmark has started stands still meanwhile."""
    name = os.environ.get("MEMFIT_GPU_LOCK", "")
    with open(name, "a") if name else contextlib.nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
            _signal_others(signal.SIGSTOP)
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the next one may need the room
        finally:
            if file is not None:
                _signal_others(signal.SIGCONT)


def _signal_others(what: signal.Signals) -> None:
    """To every other measuring process and to all that compile for one; the driver and what this process started itself go on."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_bytes()
    for process, line in lines.items():
        if any(word in line for word in (b"--here", b"compile_worker", b"multiprocessing")) and not _descends(
            process, os.getpid(), parents
        ):
            with contextlib.suppress(OSError):
                os.kill(process, what)


def _descends(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    while process > 1 and process != ancestor:
        process = parents.get(process, 0)
    return process == ancestor


def quietly(step: Callable[[], Any], model: nn.Module, device: str, held_bytes: int) -> dict[str, Any]:
    """Timed until the median is near the fastest step, at most three times; the least median counts."""
    results: list[dict[str, Any]] = []
    while len(results) < TRIES and (not results or results[-1].get("ms", 0.0) > _QUIET * results[-1].get("ms_min", 0.0)):
        results.append(timed(step, model, device, held_bytes))
    best = min(results, key=lambda r: float(r.get("ms", 1e9)))
    issued = {"issued_ms": issued_ms(step, model)} if device == "cuda" and "ms" in best else {}
    return best | issued | {"tries": [round(r["ms"], 2) for r in results if "ms" in r]}


def exact_gradients(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str) -> list[torch.Tensor] | None:
    """Of an fp64 twin: what everybody's rounding is measured against. None with dropout, or where it would be too large."""
    if has_dropout(model) or sum(p.numel() for p in model.parameters()) > _LARGE:
        return None
    twin = copy.deepcopy(model).double()
    wide = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    return gradients(lambda: loss_of(peer, twin)(wide, targets).backward(), twin)


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


def distances(exact: list[torch.Tensor], found: list[torch.Tensor]) -> dict[str, float]:
    """Of the worst entry, relative to the largest of its tensor; and of the whole gradient, in the Euclidean norm.

    A tensor whose gradient is nothing but rounding (a bias before a normalisation) is measured against the largest of all.
    """
    pairs = [(a, b.double()) for a, b in zip(exact, found, strict=True)]
    apart, length = sum(float((a - b).square().sum()) for a, b in pairs), sum(float(a.square().sum()) for a, _ in pairs)
    least = 1e-6 * max(float(a.abs().max()) for a, _ in pairs)
    worst = max(float((a - b).abs().max()) / max(float(a.abs().max()), least) for a, b in pairs)
    return {"worst": worst, "norm": (apart / length) ** 0.5}


def loss_of(peer: Peer, model: nn.Module) -> Callable[..., torch.Tensor]:
    def forward(inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = peer.loss(model(*inputs), *targets)
        return loss

    return forward


def step_of(peer: Peer, device: str, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=peer.autocast):
            loss = forward()
        loss.backward()
        return loss.detach()

    return step


def held(model: nn.Module, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> int:
    """Bytes there before a step: each tensor once, in the allocator's blocks."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers(), *inputs, *targets)}
    return sum(-(-t.numel() * t.element_size() // 512) * 512 for t in tensors.values())


# -- rows from before ---------------------------------------------------------------------------------------------------


def records(path: Path) -> list[dict[str, Any]]:
    return read_results(path)[1]


def peer_peaks(path: Path, model: str, known: list[float]) -> list[tuple[str, int]]:
    """Points of peers that no other peer's point beats, unless a budget is at the same place already."""
    points = [
        (int(r["peak_bytes"]), float(r["ms"]), str(r["what"]))
        for r in records(path)
        if r["model"] == model and "peak_bytes" in r and not r["what"].startswith("memfit") and "AdamW" not in r["what"]
    ]
    best = [p for p in points if not any(q[0] <= p[0] and q[1] < p[1] for q in points)]
    return [(what, peak) for peak, _, what in sorted(best, reverse=True) if all(abs(peak - k) > 0.01 * k for k in known)]


def compiled_peak(path: Path, model: str) -> int:
    found = peaks_before(path, model, "compile")
    return found[-1] if found else 2**50


def peaks_before(path: Path, model: str, what: str) -> list[int]:
    return [int(r["peak_bytes"]) for r in records(path) if r["model"] == model and r["what"] == what and "peak_bytes" in r]
