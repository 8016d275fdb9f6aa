"""The NumPy engine: memory against depth, matmul counts, predicted = measured, speed of the arena, bytes moved by attention."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from math import isqrt
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads: threads that wait for busy cores would be what is timed

import numpy as np

from benchmarks.lib.results import path_of, provenance, write_results
from memfit import planning, tape
from memfit.chain.strategies.revolve import num_forwards
from memfit.core.costs import Costs
from memfit.core.graph import Graph
from memfit.core.plan import Layout, Plan
from memfit.core.schedule import Schedule
from memfit.offsets import layout_plan
from memfit.planning.baselines.sqrt_segments import SqrtSegments
from memfit.report.depth_curves import depth_curves_png
from memfit.tape.array import Array, Tape
from memfit.tape.examples import nets
from memfit.tape.examples.attention_traffic import movement
from memfit.tape.examples.depth_curves import curve, wide_lstm, wide_mlp
from memfit.tape.examples.ten_layers import count_matmuls, least_matmuls, nearest_checkpoint, run_the_slides, ten_layers
from memfit.tape.memory.byte_trace import trace
from memfit.tape.memory.modes import Mode, compare, planless_modes, planned_mode
from memfit.tape.ops import activations, elementwise, views
from memfit.tape.ops.broadcast import sum_over
from memfit.tape.plain_schedules import count_recomputations, drop_early, keep_all
from memfit.tape.program import Program

SEED = 0
MOST_OPS_PLANNED = 3_000
Row = dict[str, Any]

DEPTH_TEXT = """Peak bytes beyond parameters and inputs, measured with tracemalloc at the predicted peak of each schedule; *predicted* is the
judge's number (for static and arena: the arena's height). A residual MLP (width 4, batch 1,024: small weights, large activations) and an
LSTM (width 4, batch 256) unrolled. *naive* keeps one buffer per op; *exact* frees at the last reader; *static* shares tags and works in
place; *sqrt* recomputes from √n checkpoints; *planned* is memfit's planner given exactly the bytes of *sqrt* and at most 5 s, on graphs up to 3,000 ops;
*inference* has no gradients. "none found" is a planner that gave up."""

SPEED_TEXT = """One training step (forward and backward), one BLAS thread, float32. *by hand* is the same network written in plain NumPy
expressions, as one would without an engine; *naive* is the tape with one buffer per op; *static* and *arena* run at planned offsets.
Least of the repeats, interleaved; the machine was shared with other work, so processor time is shown beside wall time, and ratios are of
processor time. The issue asks that the arena be at most 10 % slower than naive NumPy on a compute-bound net: the first two. The small
network shows where the engine's Python loop is the cost."""

NETS_TEXT = """One training step, float64, one BLAS thread. Peaks are of the whole step, parameters and inputs included, measured; *predicted* says
that measurement and prediction agree at the peak and at the end, *same numbers* that all gradients equal the naive mode's bit for bit.
*sqrt* cuts the forward ops into √n segments; *planned* gets exactly its bytes and at most 10 s. Wall times are the least of interleaved
runs on a machine shared with other work."""

LAYERS_TEXT = """Ten matmul layers and a sum, one checkpoint after the sixth (SOURCES D20). The slides count 75 because their rematerializer closes over
the loop's variables: every dropped value is rebuilt as `weights[5:10]` applied to the checkpoint, nine times five matmuls, with wrong
values. From the nearest checkpoint it takes 51, keeping a rebuilt segment until it is used 38. In the bytes of
each of the two, an exhaustive search over what to hold finds the optimum with ops in recorded order, and the planner, which may also
reorder ops, needs fewer still. *bound* is what is proven: by the search, by Revolve's theorem, or by the planner for any order."""

IO_TEXT = """Bytes that attention moves between slow and fast memory, counted by the kernels, N = 512, d = 64, float32, blocks of B rows and columns.
*formula* columns are computed from N, d, B alone (`memfit.tape.examples.attention_traffic`) and equal the counts to the byte. Forward: standard
2Nd + 2⌈N/B⌉Nd + 4N² elements, tiled 2Nd + 2⌈N/B⌉Nd + N."""

RANDOM_TEXT = """Random programs (elementwise, softmax, matmul, slices, reductions, broadcasts; float32 and float64) with all their gradients, run in
every mode. Every step's predicted bytes are compared with tracemalloc's, and every result with the naive mode's, bit for bit."""


def sqrt_plan(program: Program, depth: int) -> Plan:
    return planning.plan(program.graph, program.costs, planner=SqrtSegments(num_segments=isqrt(depth))).require_plan()


def depth_rows(depths: list[int]) -> list[Row]:
    rows: list[Row] = []
    failed: list[tuple[int, float]] = []

    def planned(program: Program, depth: int) -> Plan | None:
        if len(program.graph.ops) > MOST_OPS_PLANNED:
            return None
        start = time.perf_counter()
        plan = planning.plan(program.graph, program.costs, sqrt_plan(program, depth).timeline.peak_bytes, time_limit_s=5.0).plan
        if plan is None:
            failed.append((depth, time.perf_counter() - start))
        return plan

    panels: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for name, make in (("residual MLP", wide_mlp), ("LSTM", wide_lstm)):
        for point in curve(
            name, make, depths, {"sqrt": sqrt_plan, "planned": planned}, place=place, progress=lambda m: print(m, flush=True)
        ):
            panels.setdefault(name, {}).setdefault(point.scheme, []).append((point.depth, point.measured_bytes))
            rows.append({**asdict(point), "equal": point.predicted_bytes == point.measured_bytes})
        rows += [
            {"net": name, "scheme": "planned", "depth": d, "predicted_bytes": "none found", "measured_bytes": f"in {s:.0f} s", "num_ops": "",
             "num_recomputed": "", "equal": ""} for d, s in failed
        ]  # fmt: skip
        failed.clear()
    path_of("tape_depth").with_suffix(".png").write_bytes(depth_curves_png(panels, title="Memory against depth, measured (NumPy engine)"))
    return rows


def place(graph: Graph, schedule: Schedule, costs: Costs) -> Layout:
    return layout_plan(graph, schedule, costs, time_limit_s=1.0, alignment_bytes=8)


def ten_layer_rows() -> list[Row]:
    case = ten_layers()
    graph, costs = case.program.graph, case.matmul_costs
    everything = trace(case.program, drop_early(graph)).peak_bytes
    rows = [
        {
            "scheme": "keep everything",
            "matmuls": count_matmuls(graph, keep_all(graph)),
            "peak bytes": everything,
            "bound": 30,
            "values right": True,
        },
        {
            "scheme": "the slides' closure",
            "matmuls": run_the_slides()[0],
            "peak bytes": "",
            "bound": "",
            "values right": run_the_slides()[1],
        },
    ]
    rows.append({"scheme": "Revolve with two slots (x and one state)", "matmuls": num_forwards(10, 2) + 1 + 20, "peak bytes": "",
                 "bound": num_forwards(10, 2) + 1 + 20, "values right": True})  # fmt: skip
    for name, share in (("nearest checkpoint, each value anew", False), ("nearest checkpoint, segment kept", True)):
        schedule = nearest_checkpoint(case, share=share)
        peak = trace(case.program, schedule).peak_bytes
        rows.append({"scheme": name, "matmuls": count_matmuls(graph, schedule), "peak bytes": peak, "bound": "", "values right": True})
        rows.append({"scheme": "optimum in those bytes, ops in recorded order", "matmuls": least_matmuls(case, peak), "peak bytes": peak,
                     "bound": least_matmuls(case, peak), "values right": True})  # fmt: skip
        outcome = planning.plan(graph, costs, peak, time_limit_s=20)
        plan = outcome.require_plan()
        rows.append(
            {"scheme": f"planned in those bytes ({outcome.status})", "matmuls": count_matmuls(graph, plan.schedule),
             "peak bytes": plan.timeline.peak_bytes, "bound": outcome.lower_bound_ns, "values right": True}
        )  # fmt: skip
    return rows


def by_hand(net: nets.Net, dtype: Any) -> Callable[[], None]:
    """The MLP's step in plain NumPy."""
    weights, biases = [p.data for p in net.parameters[0::2]], [p.data for p in net.parameters[1::2]]
    x, target = net.inputs[0].data, net.targets[0].data

    def step() -> None:
        values = [x]
        for w, b in zip(weights, biases, strict=True):
            values.append(np.tanh(values[-1] @ w + b))
        g = (values[-1] - target) * dtype(2 / target.size)
        for layer in reversed(range(len(weights))):
            g = g * (1 - values[layer + 1] ** 2)
            _ = values[layer].T @ g, g.sum(axis=0)
            if layer:
                g = g @ weights[layer].T

    return step


def speed_rows(repeats: int) -> list[Row]:
    rows: list[Row] = []
    for depth, width, batch in ((8, 384, 1536), (16, 128, 1024), (20, 16, 16)):
        net = nets.mlp(depth=depth, width=width, batch=batch, dtype=np.float32)
        program = tape.compile_program([net.loss, *tape.gradients(net.loss, net.parameters)])
        plan = planning.plan(program.graph, program.costs, planner=SqrtSegments(num_segments=isqrt(depth))).require_plan()
        modes = [*planless_modes(program, place=place), planned_mode("sqrt in an arena", program, plan, place=place)]
        runs: dict[str, Callable[[], object]] = {"by hand": by_hand(net, np.float32)}
        runs |= {mode.name: mode.executor().run for mode in modes}
        least = _interleaved(runs, repeats)
        repeated = {mode.name: count_recomputations(mode.schedule) for mode in modes}
        for name, (wall, cpu) in least.items():
            rows.append(
                {"net": f"MLP {depth} x {width}, batch {batch}", "mode": name, "recomputed ops": repeated.get(name, 0),
                 "wall ms": round(wall * 1e3, 3), "processor ms": round(cpu * 1e3, 3),
                 "of by hand": round(cpu / least["by hand"][1], 3), "of naive": round(cpu / least["naive"][1], 3)}
            )  # fmt: skip
    return rows


def _interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    least = dict.fromkeys(runs, (float("inf"), float("inf")))
    for _ in range(repeats):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            least[name] = (min(least[name][0], time.perf_counter() - wall), min(least[name][1], time.process_time() - cpu))
    return least


def net_rows(repeats: int) -> list[Row]:
    """A residual CNN, an LSTM and a transformer in every mode; √n segments count ops of the forward pass."""
    rows: list[Row] = []
    cases = {
        "CNN, 8 residual blocks": nets.cnn(blocks=8, channels=8, image=16, batch=8),
        "LSTM, 64 steps of 32": nets.lstm(steps=64, width=32, batch=32),
        "transformer, 4 layers of 64": nets.transformer(layers=4, width=64, heads=4, length=64, batch=2, vocabulary=128),
        "the same with FlashAttention": nets.transformer(layers=4, width=64, heads=4, length=64, batch=2, vocabulary=128, flash=True),
    }
    for name, net in cases.items():
        results = [net.loss, *tape.gradients(net.loss, net.parameters)]
        program, plain = tape.compile_program(results), tape.compile_program(results, inplace=False)
        sqrt = planning.plan(plain.graph, plain.costs, planner=SqrtSegments(num_segments=isqrt(plain.num_forward_ops))).require_plan()
        modes = [*planless_modes(program, place=place), planned_mode("sqrt", plain, sqrt)]
        planned = planning.plan(plain.graph, plain.costs, sqrt.timeline.peak_bytes, time_limit_s=10).plan
        if planned is not None:
            modes.append(planned_mode("planned in the bytes of sqrt", plain, planned))
        table = compare(modes, repeats=repeats, every_step=False)
        arena = next(row.time_ns for row in table if row.name == "arena")
        rows += [
            {"net": name, "mode": row.name, "peak bytes": row.measured_bytes, "of naive": round(row.measured_bytes / table[0].measured_bytes, 3),
             "predicted": row.exact, "same numbers": row.same_numbers, "ops": row.num_ops, "recomputed": row.num_recomputed,
             "extra time by costs": round(row.recomputed_fraction, 3), "wall ms": round(row.time_ns / 1e6, 2), "of arena": round(row.time_ns / arena, 2)}
            for row in table
        ]  # fmt: skip
    return rows


def attention_rows() -> list[Row]:
    rng = np.random.default_rng(SEED)
    q, k, v, g = (rng.standard_normal((512, 64)).astype(np.float32) for _ in range(4))
    return [asdict(movement(q, k, v, g, block)) for block in (8, 16, 32, 64, 100, 128, 256, 512)]


UNARY: list[Callable[[Array], Array]] = [
    activations.relu, activations.tanh, activations.sigmoid, activations.softmax, elementwise.sin, lambda x: x * 0.5, lambda x: x**2,
    lambda x: views.concatenate([x, x], 0), lambda x: x[: max(1, x.shape[0] // 2)], lambda x: views.swap_axes(x, 0, 1),
    lambda x: sum_over(x, 0, keepdims=True),
]  # fmt: skip


def random_program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    t = Tape(rng.choice([np.float32, np.float64]))
    pool = [t.parameter(rng.standard_normal((rng.integers(1, 9), 5))), t.parameter(rng.standard_normal((1, 5)))]
    for _ in range(rng.integers(3, 14)):
        a, b = pool[rng.integers(len(pool))], pool[rng.integers(len(pool))]
        if rng.random() < 0.5:
            pool.append(UNARY[rng.integers(len(UNARY))](a))
        elif a.shape[1] == b.shape[1] and rng.random() < 0.5:
            pool.append(a @ b.T)
        elif all(m == n or 1 in (m, n) for m, n in zip(a.shape, b.shape, strict=True)):
            pool.append(a * b if rng.random() < 0.5 else a - b)
    loss = sum_over(pool[-1] * pool[-1]) + sum_over(pool[-2] * pool[-2])
    return tape.compile_program([loss, *tape.gradients(loss, pool[:2])])


def random_rows(count: int) -> list[Row]:
    totals: dict[str, Row] = {}
    for seed in range(count):
        program = random_program(seed)
        modes = [*planless_modes(program, place=place)]
        for name in ("sqrt_segments", "greedy", "auto"):
            outcome = planning.plan(program.graph, program.costs, planner=name, time_limit_s=0.2)
            peak = int(0.8 * max(outcome.require_plan().timeline.bytes_at_step))
            tight = planning.plan(program.graph, program.costs, peak, planner=name, time_limit_s=0.2).plan
            if tight is not None:
                modes += [
                    planned_mode(f"{name} at 80 %", program, tight),
                    planned_mode(f"{name} at 80 %, arena", program, tight, place=place),
                ]
        reference = modes[0].executor().run()
        for mode in modes:
            _count(totals.setdefault(mode.name, {"mode": mode.name, "programs": 0, "steps": 0, "steps that differ": 0, "results that differ": 0}),
                   mode, reference)  # fmt: skip
    return list(totals.values())


def _count(total: Row, mode: Mode, reference: tuple[np.ndarray, ...]) -> None:
    seen = mode.trace()
    total["programs"] += 1
    total["steps"] += len(seen.predicted_bytes)
    total["steps that differ"] += sum(a != b for a, b in zip(seen.predicted_bytes, seen.measured_bytes, strict=True))
    total["results that differ"] += sum(not np.array_equal(a, b, equal_nan=True) for a, b in zip(seen.results, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", default=["layers", "attention", "random", "speed", "nets", "depth"], help="which parts to run"
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[10, 30, 100, 300, 1000], help="depths of the curves")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs; the least counts")
    parser.add_argument("--programs", type=int, default=100, help="random programs")
    chosen = parser.parse_args()
    parts: dict[str, tuple[str, str, Callable[[], list[Row]]]] = {
        "layers": ("Ten layers, one checkpoint: matmuls", LAYERS_TEXT, ten_layer_rows),
        "attention": ("Bytes moved by attention", IO_TEXT, attention_rows),
        "random": ("Predicted = measured on random programs", RANDOM_TEXT, lambda: random_rows(chosen.programs)),
        "speed": ("Speed of planned memory", SPEED_TEXT, lambda: speed_rows(chosen.repeats)),
        "nets": ("Memory modes on a CNN, an LSTM and a transformer", NETS_TEXT, lambda: net_rows(chosen.repeats)),
        "depth": ("Memory against depth", DEPTH_TEXT, lambda: depth_rows(chosen.depths)),
    }
    for name in chosen.parts:
        title, text, measure = parts[name]
        rows = measure()
        write_results(
            f"tape_{name}", title=title, text=text, columns=list(rows[0]), rows=rows, run=provenance(SEED, ("numpy", "numba", "scipy"))
        )


if __name__ == "__main__":
    main()
