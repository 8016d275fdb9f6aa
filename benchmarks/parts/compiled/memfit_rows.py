"""What `compiled.py measure` measures of memfit: many budgets, called and replayed or with offload, starts, a planned arena, an optimizer."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pickle
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.lib.gpu import gradients, synchronize, worst_difference
from benchmarks.lib.measuring import (
    TRIES,
    Rows,
    compiled_peak,
    distances,
    exact_gradients,
    gpu,
    has_dropout,
    held,
    loss_of,
    peaks_before,
    peer_peaks,
    quietly,
    step_of,
)
from benchmarks.lib.replays import recorded
from benchmarks.models.peers import Peer


def planned(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, args: argparse.Namespace) -> Rows:
    """memfit at several budgets. Tracing, compiling and measuring happen once, and are timed as the cold start."""
    from memfit.capture.inputs import Call
    from memfit.compilers.inductor import helper_processes
    from memfit.core.budget import Budget
    from memfit.core.errors import MemfitError
    from memfit.core.schedule import Offload
    from memfit.pipeline.beside import count_slack
    from memfit.pipeline.choice import FormSearch, PlanSettings
    from memfit.pipeline.task import Task
    from memfit.report.progress import Progress
    from memfit.runtime.autograd_step import Ready, Session, run
    from memfit.runtime.codegen import generate

    reference = exact = None
    if not has_dropout(model):
        with gpu():
            reference = gradients(step_of(peer, device, lambda: loss_of(peer, model)(inputs, targets)), model)
            exact = exact_gradients(peer, model, inputs, targets, device)
    task = Task(model=model, loss_fn=peer.loss, num_targets=len(targets), engine="inductor")
    call = Call.flatten((*inputs, *targets), {})
    forms = _Forms(task)
    with helper_processes():
        yield from _starts(peer, task, call, device, forms, args)
    offers = list(forms.measured)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / f"{peer.name}.pickle").write_bytes(pickle.dumps([(form.captured.graph, form.costs) for form in offers]))
    sources = (*model.parameters(), *model.buffers(), *call.tensors)
    full = compiled_peak(args.output, peer.name)
    whole = offers[0].keep_all
    shares = [float(f) for f in args.fractions.split(",") if f]
    queue = [("a third of eager", peak // 3, 0, 1) for peak in peaks_before(args.output, peer.name, "eager")[-1:]]
    queue += [(f"{share:.0%}", int(full * share), 0, 1) for share in shares]
    queue += [(f"where {name} is", peak, 0, 1) for name, peak in peer_peaks(args.output, peer.name, [full * share for share in shares])]
    ways = ["offload"] * args.offload + ["replayed"] * args.replay
    queue = [entry for plain in queue for entry in (plain, *((f"{plain[0]}, {way}", *plain[1:]) for way in ways))]
    while queue:
        name, budget, tighter_by, tries = queue.pop(0)
        row = {"what": f"memfit {name}", "budget_bytes": budget, "tighter_by": tighter_by, "try": tries}
        begin = time.perf_counter()
        replays = name.endswith("replayed")
        aside_bytes = sum(t.nbytes for t in call.tensors) if replays else 0  # as memfit.fit: a replay reads copies of its inputs
        limit = Budget(device_bytes=budget - count_slack(offers[0].captured, budget) - tighter_by - aside_bytes)
        settings = PlanSettings(time_limit_s=args.plan_seconds, compare_all=True, offload=name.endswith("offload"))
        try:
            with torch.autocast(device, torch.bfloat16, enabled=peer.autocast), helper_processes(), Progress("plan") as progress:
                search = FormSearch(cost=partial(forms.cost, progress=progress), budget=limit, settings=settings, progress=progress)
                choice = search.choose(offers, forms.slower(), whole)
                captured, costs, plan = choice.form.captured, choice.form.costs, choice.plan
        except MemfitError as error:
            yield row | {"plan_s": time.perf_counter() - begin, "status": type(error).__name__, "reason": str(error)}
            queue = [entry for entry in queue if not entry[0].startswith(f"{name}, ")]
            continue
        sent = [s.storage for s in plan.schedule.steps if isinstance(s, Offload)]
        if settings.offload and not sent:
            continue  # nothing new
        row |= {"sent_bytes": sum(captured.graph.storages[s].size_bytes for s in sent)}
        row |= {"plan_s": time.perf_counter() - begin, "status": "planned", "offer": forms.number_of(captured)}
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
        peak_bytes = result.get("peak_bytes", 0)
        if peak_bytes > budget and tries < TRIES:  # the closed loop of memfit.fit: a miss above the budget re-plans tighter by as much
            queue.insert(0, (name, budget, tighter_by + peak_bytes - plan.timeline.peak_bytes, tries + 1))


class _Forms:
    """The forms of a step, each made, compiled and measured once for all budgets."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self.measured: list[Any] = []  # the usual ones first
        self._known: dict[int, Any] = {}

    def begin(self, forms: Any) -> None:
        """A start from the beginning: forms are made again."""
        self.measured.clear()
        self._forms = forms
        self._slower: list[tuple[Any, Iterator[Any]]] | None = None  # asking for them traces the step, which is timed

    def slower(self) -> Iterator[Any]:
        self._slower = list(self._forms.slower()) if self._slower is None else self._slower
        for k, (use, way) in enumerate(self._slower):
            kept, again = itertools.tee(way)
            self._slower[k] = (use, kept)
            yield use, again

    def cost(self, form: Any, progress: Any) -> Any:
        from memfit.compilers.inductor import compile_pieces
        from memfit.passes.regions.regions import regions_of
        from memfit.pipeline.costs import cost

        if id(form) not in self._known:
            compile_pieces(regions_of(form.captured), progress.update)
            with gpu():
                self._known[id(form)] = cost(form, self._task, progress)
            self.measured.append(self._known[id(form)])
        return self._known[id(form)]

    def number_of(self, captured: Any) -> int:
        return [form.captured for form in self.measured].index(captured)


def _starts(peer: Peer, task: Any, call: Any, device: str, forms: _Forms, args: argparse.Namespace) -> Rows:
    """Makes the usual forms; a row for the cold start, and one for a warm start with everything in the caches."""
    from memfit.compilers.inductor import compile_pieces
    from memfit.passes.regions import piece as region
    from memfit.passes.regions.regions import regions_of
    from memfit.pipeline.costs import cost
    from memfit.pipeline.forms import Forms
    from memfit.report.progress import Progress

    for what in ("memfit ready", "memfit ready again")[: 1 if args.once else 2]:
        every = Forms(task, call)
        forms.begin(every)
        region._COMPILED.clear()
        begin, waited = time.perf_counter(), 0.0
        stages: dict[str, list[float]] = {"capture_s": [], "compile_s": [], "measure_s": [], "ops": [], "regions": [], "choices": []}
        with torch.autocast(device, torch.bfloat16, enabled=peer.autocast), Progress("memfit") as progress:
            mark = time.perf_counter()
            for form in every.usual():
                captured = form.captured
                stages["capture_s"].append(time.perf_counter() - mark)
                stages["ops"].append(len(captured.graph.ops))
                stages["regions"].append(len(regions_of(captured)))
                stages["choices"].append(sum(len(op.variants) + op.name.startswith(("again", "apart")) for op in captured.graph.ops))
                mark = time.perf_counter()
                if what == "memfit ready":
                    compile_pieces(regions_of(captured), progress.update)
                stages["compile_s"].append(time.perf_counter() - mark)
                mark = time.perf_counter()
                with gpu():
                    waited += time.perf_counter() - mark
                    mark = time.perf_counter()
                    forms.measured.append(cost(form, task, progress))
                stages["measure_s"].append(time.perf_counter() - mark)
                mark = time.perf_counter()
        yield {"what": what, "cold_s": time.perf_counter() - begin - waited, **stages}


def started(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """From `memfit.fit` to the end of the first step, as a user waits for it."""
    budget = int(0.75 * compiled_peak(args.output, peer.name))
    begin = time.perf_counter()
    with phases() as seconds:
        fitted = fit(peer, model, inputs, targets, device, budget=budget, time_limit_s=args.plan_seconds)
    fit_s = time.perf_counter() - begin
    step_of(peer, device, lambda: fitted(*inputs, *targets))()
    synchronize(device)
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


def reserved(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Reserved bytes of every step; in a planned arena steps 4 and 8 may re-plan because of them."""
    budget = int(0.5 * compiled_peak(args.output, peer.name))
    fitted = fit(peer, model, inputs, targets, device, budget=budget, time_limit_s=args.plan_seconds)
    step, held_back, allocated, times = step_of(peer, device, lambda: fitted(*inputs, *targets)), [], [], []
    for _ in range(14):
        model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
        held_back.append(torch.cuda.max_memory_reserved() if device == "cuda" else 0)
        allocated.append(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    report = fitted.report()
    about = {"notes": report.notes, "arena_bytes": report.arena_bytes, "predicted_peak_bytes": report.predicted_peak_bytes}
    series = {"reserved_bytes": held_back, "allocated_bytes": allocated, "step_ms": times}
    what = "memfit 50%, planned arena" if report.arena_bytes else "memfit 50%, caching allocator"
    return {"what": what, "budget_bytes": budget, "ms": sorted(times[-4:])[1], **series, **about}


def with_optimizer(peer: Peer, model: nn.Module, inputs: Any, targets: Any, device: str, plan_seconds: float) -> Rows:
    """A whole step with AdamW: torch.compile, then memfit.fit at half of its peak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = torch.compile(loss_of(peer, model), dynamic=False)
    optimized = step_of(peer, device, lambda: forward(inputs, targets))

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
    planned_step = step_of(peer, device, lambda: fitted(*inputs, *targets))

    def ours() -> None:
        planned_step()
        optimizer.step()

    with gpu():
        result = quietly(ours, model, device, before)
    report = fitted.report()
    yield {"what": "memfit 50%, with AdamW", "budget_bytes": budget, "cold_s": ready_s, "report": report.as_data(), **result}
