"""What `gpu_compiled.py` measures of one model: torch.compile and eager with and without checkpoints, and memfit at many budgets.

Every row is yielded as soon as it is measured. Whatever is timed holds a lock on the GPU; compiling does not.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_eager import gradients, timed, worst_difference
from benchmarks.peers import Peer, checkpoint_blocks
from benchmarks.replays import issued_ms, recorded, replayed

# memfit.fit to the first step, cold; in another process, with what that left on disk; likewise in a planned arena
STARTS = ("start", "start again", "reserved")
_QUIET = 1.03  # median over fastest step: above it somebody else was at work, and the steps are timed again
_TRIES = 3
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


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(peer: Peer, part: str, device: str, args: argparse.Namespace) -> Rows:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = peer.model(device)
    inputs, targets = peer.data(device, args.scale)
    if part == "memfit":
        yield from planned(peer, model, inputs, targets, device, args)
        return
    if part == "reserved":
        yield in_arena(peer, model, inputs, targets, device, args)
        return
    if part in STARTS:
        yield started(peer, model, inputs, targets, device, args)
        return
    if part == "adamw":
        yield from with_optimizer(peer, model, inputs, targets, device, args.plan_seconds)
        return
    if part.endswith("checkpoint"):
        checkpoint_blocks(model, peer.blocks)
    if part.startswith("budget"):
        torch._functorch.config.activation_memory_budget = float(part.split()[1])
    forward = _loss_of(peer, model) if part.startswith("eager") else torch.compile(_loss_of(peer, model), dynamic=False)
    step = _step(peer, device, lambda: forward(inputs, targets))
    begin = time.perf_counter()
    step()
    _sync(device)
    first_s = time.perf_counter() - begin
    with gpu():
        result = quietly(step, model, device, held(model, inputs, targets))
        if part in ("compile", "eager"):
            exact = exact_gradients(peer, model, inputs, targets, device)
            result |= {"from_fp64": None if exact is None else distances(exact, gradients(step, model))}
        yield {"what": part, "cold_s": first_s, **result}
        if args.replay and not part.startswith("eager"):
            yield {"what": f"{part}, replayed", **replayed(step, model, held(model, inputs, targets))}


def quietly(step: Callable[[], Any], model: nn.Module, device: str, held_bytes: int) -> dict[str, Any]:
    """Timed until the median is near the fastest step, at most three times; the least median counts."""
    results: list[dict[str, Any]] = []
    while len(results) < _TRIES and (not results or results[-1].get("ms", 0.0) > _QUIET * results[-1].get("ms_min", 0.0)):
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
    return gradients(lambda: _loss_of(peer, twin)(wide, targets).backward(), twin)


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


def _loss_of(peer: Peer, model: nn.Module) -> Callable[..., torch.Tensor]:
    def forward(inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = peer.loss(model(*inputs), *targets)
        return loss

    return forward


def _step(peer: Peer, device: str, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
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


def planned(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, args: argparse.Namespace) -> Rows:
    """memfit at several budgets. Tracing, compiling and measuring happen once, and are timed as the cold start."""
    from memfit.capture.inputs import Call
    from memfit.core.budget import Budget
    from memfit.core.errors import MemfitError
    from memfit.core.schedule import Offload
    from memfit.execute.codegen import generate
    from memfit.execute.session import Ready, Session, run
    from memfit.prepare import PlanSettings, allocator_slack, best_plan
    from memfit.report.progress import Progress
    from memfit.task import Task

    reference = exact = None
    if not has_dropout(model):
        with gpu():
            reference = gradients(_step(peer, device, lambda: _loss_of(peer, model)(inputs, targets)), model)
            exact = exact_gradients(peer, model, inputs, targets, device)
    task = Task(model=model, loss_fn=peer.loss, num_targets=len(targets), engine="inductor")
    call = Call.flatten((*inputs, *targets), {})
    offers: list[Any] = []
    for row in _offers(peer, task, call, device, offers):
        yield row
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / f"{peer.name}.pickle").write_bytes(pickle.dumps([(c.graph, costs) for c, costs in offers]))
    sources = (*model.parameters(), *model.buffers(), *call.tensors)
    full = _compiled_peak(args.output, peer.name)
    sliced: list[Any] = []
    shares = [float(f) for f in args.fractions.split(",") if f]
    queue = [("a third of eager", peak // 3, 0, 1) for peak in _peaks_of(args.output, peer.name, "eager")[-1:]]
    queue += [(f"{share:.0%}", int(full * share), 0, 1) for share in shares]
    queue += [(f"where {name} is", peak, 0, 1) for name, peak in _peer_peaks(args.output, peer.name, [full * share for share in shares])]
    others = ["offload"] * args.offload + ["replayed"] * args.replay
    queue = [entry for plain in queue for entry in (plain, *((f"{plain[0]}, {other}", *plain[1:]) for other in others))]
    while queue:
        name, budget, tighter_by, tries = queue.pop(0)
        row = {"what": f"memfit {name}", "budget_bytes": budget, "tighter_by": tighter_by, "try": tries}
        begin = time.perf_counter()
        replays = name.endswith("replayed")
        aside_bytes = sum(t.nbytes for t in call.tensors) if replays else 0  # as memfit.fit: a replay reads copies of its inputs
        limit = Budget(device_bytes=budget - allocator_slack(offers[0][0], budget) - tighter_by - aside_bytes)
        settings = PlanSettings(time_limit_s=args.plan_seconds, compare_all=True, offload=name.endswith("offload"))
        try:
            with Progress("plan") as progress:
                captured, costs, plan = best_plan([*offers, *sliced], limit, settings, progress)
        except MemfitError as error:
            yield row | {"plan_s": time.perf_counter() - begin, "status": type(error).__name__, "reason": str(error)}
            retries: list[tuple[str, int, int, int]] = []
            if not sliced:  # as memfit.fit: only when nothing else has a plan
                with gpu(), Progress("memfit") as progress:
                    sliced = [task.costed(c, progress) for c in task.last_offers(call)]
                retries = [(name, budget, tighter_by, tries)] if sliced else []
            queue = [*retries, *(entry for entry in queue if retries or not entry[0].startswith(f"{name}, "))]
            continue
        sent = [s.storage for s in plan.schedule.steps if isinstance(s, Offload)]
        if settings.offload and not sent:
            continue  # nothing new
        row |= {"sent_bytes": sum(captured.graph.storages[s].size_bytes for s in sent)}
        row |= {"plan_s": time.perf_counter() - begin, "status": "planned", "offer": [c for c, _ in (*offers, *sliced)].index(captured)}
        program = generate(captured, plan.schedule)
        ready = Ready(captured=captured, costs=costs, plan=plan, program=program, keep_all_peak_bytes=0, base_time_ns=0)

        def step(ready: Ready = ready) -> torch.Tensor:
            loss: torch.Tensor = run(Session(ready, sources, trial=False, replan=lambda _: None))
            loss.backward()
            return loss.detach()

        with gpu():
            bytes_known: dict[str, Any] = {}
            if replays:
                try:
                    step, bytes_known = recorded(ready, sources, held(model, inputs, targets))
                except RuntimeError as error:
                    yield row | {"error": f"{type(error).__name__}: {error}"[:500]}
                    continue
            result = quietly(step, model, device, held(model, inputs, targets)) | bytes_known
            found = None if reference is None else gradients(step, model)
            del step
        predicted = {"predicted_peak_bytes": plan.timeline.peak_bytes, "predicted_ms": plan.timeline.time_ns / 1e6}
        if reference is not None and found is not None:
            row |= {"worst_gradient_difference": worst_difference(reference, found)}
            row |= {"from_fp64": None if exact is None else distances(exact, found)}
        yield row | predicted | result
        over = result.get("peak_bytes", 0) - budget
        if over > 0 and tries < _TRIES:  # the closed loop of memfit.fit: a miss re-plans tighter
            queue.insert(0, (name, budget, tighter_by + over, tries + 1))


def _offers(peer: Peer, task: Any, call: Any, device: str, offers: list[Any]) -> Rows:
    """Fills `offers`; a row for the cold start, and one for a warm start with everything in the caches."""
    from memfit.capture import region
    from memfit.capture.regions import regions_of
    from memfit.report.progress import Progress
    from memfit.task import compile_regions

    for what in ("memfit ready", "memfit ready again"):
        offers.clear()
        region._COMPILED.clear()
        begin, waited = time.perf_counter(), 0.0
        stages: dict[str, list[float]] = {"capture_s": [], "compile_s": [], "measure_s": [], "ops": [], "regions": [], "choices": []}
        with torch.autocast(device, torch.bfloat16, enabled=peer.autocast), Progress("memfit") as progress:
            mark = time.perf_counter()
            for captured in task.offers(call):
                stages["capture_s"].append(time.perf_counter() - mark)
                stages["ops"].append(len(captured.graph.ops))
                stages["regions"].append(len(regions_of(captured)))
                stages["choices"].append(sum(len(op.variants) + op.name.startswith(("again", "apart")) for op in captured.graph.ops))
                mark = time.perf_counter()
                if what == "memfit ready":
                    compile_regions(regions_of(captured), progress)
                stages["compile_s"].append(time.perf_counter() - mark)
                mark = time.perf_counter()
                with gpu():
                    waited += time.perf_counter() - mark
                    mark = time.perf_counter()
                    offers.append(task.costed(captured, progress))
                stages["measure_s"].append(time.perf_counter() - mark)
                mark = time.perf_counter()
        yield {"what": what, "cold_s": time.perf_counter() - begin - waited, **stages}


def started(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """From `memfit.fit` to the end of the first step, as a user waits for it."""
    budget = int(0.75 * _compiled_peak(args.output, peer.name))
    begin = time.perf_counter()
    with phases() as seconds:
        fitted = fit(peer, model, inputs, targets, device, budget=budget, time_limit_s=args.plan_seconds)
    fit_s = time.perf_counter() - begin
    _step(peer, device, lambda: fitted(*inputs, *targets))()
    _sync(device)
    return {"what": "memfit.fit 75%", "budget_bytes": budget, "fit_s": fit_s, "phases": seconds, "cold_s": time.perf_counter() - begin}


@contextlib.contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds by what the progress bar says meanwhile."""
    from memfit.report.progress import Progress

    seconds: dict[str, float] = {}
    update, last = Progress.update, ["before", time.perf_counter()]

    def note(bar: Progress, phase: str, done: int = 0, total: int = 0) -> None:
        now = time.perf_counter()
        seconds[str(last[0])] = seconds.get(str(last[0]), 0.0) + now - float(last[1])
        last[:] = [phase.split(",")[0], now]
        update(bar, phase, done, total)

    Progress.update = note  # type: ignore[method-assign]
    try:
        yield seconds
        note(Progress("end"), "end")
    finally:
        Progress.update = update  # type: ignore[method-assign]


def fit(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, **options: Any) -> Any:
    import memfit

    with torch.autocast(device, torch.bfloat16, enabled=peer.autocast):
        return memfit.fit(model, inputs, loss_fn=peer.loss, example_targets=targets, engine="inductor", check=False, **options)


def in_arena(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Reserved bytes of every step under a planned arena; steps 4 and 8 may re-plan because of them."""
    budget = int(0.5 * _compiled_peak(args.output, peer.name))
    fitted = fit(peer, model, inputs, targets, device, budget=budget, time_limit_s=args.plan_seconds)
    step, reserved, allocated, times = _step(peer, device, lambda: fitted(*inputs, *targets)), [], [], []
    for _ in range(14):
        model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        _sync(device)
        times.append((time.perf_counter() - begin) * 1e3)
        reserved.append(torch.cuda.max_memory_reserved() if device == "cuda" else 0)
        allocated.append(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    report = fitted.report()
    about = {"notes": report.notes, "arena_bytes": report.arena_bytes, "predicted_peak_bytes": report.predicted_peak_bytes}
    series = {"reserved_bytes": reserved, "allocated_bytes": allocated, "step_ms": times}
    return {"what": "memfit 50%, planned arena", "budget_bytes": budget, "ms": sorted(times[-4:])[1], **series, **about}


def _peer_peaks(path: Path, model: str, known: list[float]) -> list[tuple[str, int]]:
    """Points of peers that no other peer's point beats, unless a budget is at the same place already."""
    points = [
        (int(r["peak_bytes"]), float(r["ms"]), str(r["what"]))
        for r in records(path)
        if r["model"] == model and "peak_bytes" in r and not r["what"].startswith("memfit") and "AdamW" not in r["what"]
    ]
    best = [p for p in points if not any(q[0] <= p[0] and q[1] < p[1] for q in points)]
    return [(what, peak) for peak, _, what in sorted(best, reverse=True) if all(abs(peak - k) > 0.01 * k for k in known)]


def _compiled_peak(path: Path, model: str) -> int:
    found = _peaks_of(path, model, "compile")
    return found[-1] if found else 2**50


def _peaks_of(path: Path, model: str, what: str) -> list[int]:
    return [int(r["peak_bytes"]) for r in records(path) if r["model"] == model and r["what"] == what and "peak_bytes" in r]


def with_optimizer(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, plan_seconds: float) -> Rows:
    """A whole step with AdamW: torch.compile, then memfit.fit at half of its peak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = torch.compile(_loss_of(peer, model), dynamic=False)
    optimized = _step(peer, device, lambda: forward(inputs, targets))

    def whole() -> None:
        optimized()
        optimizer.step()

    whole()
    before = held(model, inputs, targets) + sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    with gpu():
        peer_row = quietly(whole, model, device, before)
    yield {"what": "compile, with AdamW", **peer_row}
    budget = peer_row["peak_bytes"] // 2
    begin = time.perf_counter()
    fitted = fit(peer, model, inputs, targets, device, budget=budget, optimizer=optimizer, time_limit_s=plan_seconds)
    ready_s = time.perf_counter() - begin
    planned_step = _step(peer, device, lambda: fitted(*inputs, *targets))

    def ours() -> None:
        planned_step()
        optimizer.step()

    with gpu():
        result = quietly(ours, model, device, before)
    report = fitted.report()
    yield {"what": "memfit 50%, with AdamW", "budget_bytes": budget, "cold_s": ready_s, "report": report.as_data(), **result}


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
