"""Task trees: Liu's traversal at scale, post-order against optimal on assembly, random and harpoon trees, P processors."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sparse

from benchmarks.lib.results import provenance, write_results
from memfit.tasks import assembly_tree, best_postorder, harpoon, judge_order, liu_order, random_tree, recognize_tree, schedule, tree_graph
from memfit.tasks.api import PARALLEL, run_parallel
from memfit.tasks.graph import TaskGraph
from memfit.tasks.judge import judge_parallel
from memfit.tasks.sequential.choose_algorithm import solve

PACKAGES = ("numpy", "scipy", "numba", "pymetis", "cvxopt")
DEBIAN_GRAPHS = Path("/usr/share/doc/libmetis-dev/examples/graphs")


def read_metis(path: Path) -> sparse.csr_matrix:
    """A graph in METIS format (no weights) as a pattern."""
    with path.open() as file:
        num_vertices = int(file.readline().split()[0])
        lines = [np.array(line.split(), np.int64) - 1 for line in file][:num_vertices]
    rows = np.repeat(np.arange(num_vertices), [len(x) for x in lines])
    return sparse.csr_matrix((np.ones(len(rows), np.int8), (rows, np.concatenate(lines))), shape=(num_vertices, num_vertices))


def grid(*sides: int, corners: bool = False) -> sparse.csr_matrix:
    """A regular grid in 2 or 3 dimensions; with corners, all neighbours (9 or 27 points)."""
    total = sparse.identity(1)
    parts = []
    for side in sides:
        line = sparse.diags([1, 1, 1], [-1, 0, 1], shape=(side, side))
        if corners:
            total = sparse.kron(total, line)
        else:
            parts = [sparse.kron(p, sparse.identity(side)) for p in parts]
            parts.append(sparse.kron(sparse.identity(total.shape[0]), line))
            total = sparse.identity(total.shape[0] * side)
    return sparse.csr_matrix(total if corners else sum(parts))


def matrices(folder: Path | None, seed: int) -> Iterator[tuple[str, sparse.csr_matrix]]:
    for side in (20, 40, 70, 100):
        yield f"grid2d-{side}", grid(side, side)
        yield f"grid2d9-{side}", grid(side, side, corners=True)
    for side in (8, 12, 16, 20):
        yield f"grid3d-{side}", grid(side, side, side)
        yield f"grid3d27-{side}", grid(side, side, side, corners=True)
    rng = np.random.default_rng(seed)
    for n, degree in ((500, 2), (1000, 2), (2000, 1.5), (4000, 1.2)):
        yield f"random-{n}", sparse.random(n, n, density=degree / n, random_state=rng, format="csr")
    for path in sorted(folder.glob("*.graph")) if folder is not None and folder.is_dir() else ():
        yield path.stem, read_metis(path)


def _least(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


# -- speed -----------------------------------------------------------------------------------------------------------


def _cold_seconds() -> float:
    """The first call in a fresh process with an empty kernel cache: import of numba and compilation included."""
    code = (
        "import time; from memfit.tasks import *; t = recognize_tree(random_tree(200000)); t.postorder; t.children_bytes;"
        "b = time.perf_counter(); liu_order(t); print(time.perf_counter() - b)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def speed(folder: Path | None, seed: int) -> None:
    cases: list[tuple[str, TaskGraph]] = []
    if folder is not None and (folder / "mdual.graph").exists():
        cases.append(("mdual, METIS, fundamental supernodes", assembly_tree(read_metis(folder / "mdual.graph"), "metis", 0.0)))
    for n in (10_000, 100_000, 300_000, 1_000_000):
        cases.append((f"random, uniform parent, {n}", random_tree(n, seed=seed)))
        cases.append((f"random, deep, {n}", random_tree(n, seed=seed, attach="deep")))
    n = 1_000_000
    cases.append((f"chain, {n}", tree_graph(np.append(np.arange(1, n), -1), np.arange(n) % 97 + 1)))
    cases.append((f"star, {n}", tree_graph(np.append(np.full(n - 1, n - 1), -1), np.arange(n) % 97 + 1)))
    rows = []
    for name, graph in cases:
        whole = _least(lambda g=graph: liu_order(recognize_tree(g)), 2)  # type: ignore[misc, arg-type]
        tree = recognize_tree(graph)
        assert tree is not None
        alone, post = _least(lambda t=tree: liu_order(t), 3), _least(lambda t=tree: best_postorder(t), 3)  # type: ignore[misc]
        order, peak = liu_order(tree)
        assert judge_order(graph, order).peak_bytes == peak
        rows.append(
            {"tree": name, "nodes": graph.num_tasks, "Liu s": f"{alone:.3f}", "with tree set-up s": f"{whole:.3f}", "post-order s": f"{post:.3f}",
             "post-order / optimal": f"{best_postorder(tree)[1] / peak:.4f}"}
        )  # fmt: skip
        print(rows[-1], file=sys.stderr)
    text = (
        "Liu's optimal traversal, minimum of 3 runs with the compiled kernel at hand; the machine was shared. Every order is checked by the "
        f"judge. The first call ever on a machine compiles: {_cold_seconds():.1f} s for 200,000 nodes in a fresh process with an empty cache "
        "(import of numba included); later processes load the compiled kernel. The issue asks for 2 s at 186,000 nodes."
    )
    write_results(
        "task_speed",
        title="Liu's optimal traversal: time against size",
        text=text,
        columns=list(rows[0]),
        rows=rows,
        run=provenance(seed, PACKAGES),
    )


# -- the lecture's statistics ----------------------------------------------------------------------------------------


def _excess(graph: TaskGraph) -> float:
    tree = recognize_tree(graph)
    assert tree is not None
    return best_postorder(tree)[1] / liu_order(tree)[1] - 1


def _summary(name: str, found: list[float], lecture: tuple[str, str, str]) -> dict[str, Any]:
    worse = [x for x in found if x > 0]
    return {
        "trees": name, "number": len(found), "non-optimal": f"{100 * len(worse) / len(found):.1f} %", "max": f"+{100 * max(found):.1f} %",
        "mean of non-optimal": f"+{100 * float(np.mean(worse)) if worse else 0:.1f} %", "mean of all": f"+{100 * float(np.mean(found)):.2f} %",
        "lecture: non-optimal": lecture[0], "lecture: max": lecture[1], "lecture: mean": lecture[2],
    }  # fmt: skip


def statistics(folder: Path | None, seed: int, quick: bool) -> None:
    rng = np.random.default_rng(seed)
    assembly, weighted, raw = [], [], []
    for name, matrix in matrices(folder, seed):
        if quick and matrix.shape[0] > 30_000:
            continue
        for ordering in ("metis", "amd", "rcm", "natural"):
            if matrix.shape[0] > 30_000 and ordering in ("rcm", "natural"):
                continue  # their fronts are too large to be realistic
            for amalgamation in (None, 0.0, 0.1, 0.3):
                graph = assembly_tree(matrix, ordering, amalgamation)
                excess = _excess(graph)
                assembly.append(excess)
                raw.append({"tree": f"{name} {ordering} {amalgamation}", "nodes": graph.num_tasks, "excess": excess, "kind": "assembly"})
                weighted.append(_excess(_random_weights(graph, rng)))
                raw.append(
                    {
                        "tree": f"{name} {ordering} {amalgamation}",
                        "nodes": graph.num_tasks,
                        "excess": weighted[-1],
                        "kind": "random weights",
                    }
                )
        print(name, matrix.shape[0], f"{len(assembly)} trees", file=sys.stderr)
    uniform = [_excess(random_tree(int(rng.integers(50, 3000)), seed=k)) for k in range(400)]
    deep = [_excess(random_tree(int(rng.integers(50, 3000)), seed=k, attach="deep")) for k in range(400)]
    rows = [
        _summary("assembly trees", assembly, ("4.2 %", "+18 %", "+1 %")),
        _summary("assembly trees with random sizes", weighted, ("61 %", "+22 %", "+12 %")),
        _summary("random trees, uniform parent", uniform, ("61 %", "+22 %", "+12 %")),
        _summary("random trees, deep", deep, ("61 %", "+22 %", "+12 %")),
    ]
    text = (
        "How much more the best post-order holds than the optimal order. Assembly trees: grids of 5, 9, 7 and 27 points, random patterns"
        + (" and the graphs of Debian's libmetis-doc" if folder is not None else "")
        + ", each under METIS, AMD, reverse Cuthill-McKee and natural order (the last two only up to 30,000 columns), with four amalgamations. "
        "*Random sizes*: the same trees with outputs uniform in [1, N] and working memories in [1, N/500], N the number of nodes, which is how "
        "the paper behind the lecture's figures makes its random trees (recalled, not verified). Our corpus is not the lecture's "
        "(University of Florida matrices), so the columns stand beside each other; they do not reproduce each other."
    )
    write_results(
        "task_statistics",
        title="Post-order against optimal: the lecture's statistics re-measured",
        text=text,
        columns=list(rows[0]),
        rows=rows,
        run=provenance(seed, PACKAGES),
    )
    write_results(
        "task_statistics_raw",
        title="Post-order against optimal, every tree",
        text="One row per tree; see task_statistics.",
        columns=["tree", "kind", "nodes", "excess"],
        rows=raw,
        run=provenance(seed, PACKAGES),
    )


def _random_weights(graph: TaskGraph, rng: np.random.Generator) -> TaskGraph:
    n = graph.num_tasks
    parent = np.full(n, -1, np.int64)
    parent[graph.edges[:, 0]] = graph.edges[:, 1]
    return tree_graph(parent, rng.integers(1, n + 1, n), rng.integers(1, max(n // 500, 1) + 1, n))


def harpoons(seed: int) -> None:
    rows = []
    for levels in range(1, 10):
        large, small, branches = 3_000_000, 1, 3
        graph = harpoon(branches=branches, levels=levels, large=large, small=small)
        tree = recognize_tree(graph)
        assert tree is not None
        post, best = best_postorder(tree)[1], liu_order(tree)[1]
        rows.append(
            {"K": levels, "nodes": graph.num_tasks, "post-order": post, "M+e+K(b-1)M/b": large + small + levels * (branches - 1) * large // branches,
             "optimal": best, "M+e+K(b-1)e": large + small + levels * (branches - 1) * small, "ratio": f"{post / best:.3f}"}
        )  # fmt: skip
    text = "b = 3 branches, M = 3,000,000, e = 1. The measured peaks are the formulas of the lecture; the ratio grows without end."
    write_results("task_harpoon", title="The harpoon family", text=text, columns=list(rows[0]), rows=rows, run=provenance(seed, PACKAGES))


# -- P processors ----------------------------------------------------------------------------------------------------


def parallel(folder: Path | None, seed: int) -> None:
    trees = [
        ("grid2d-70 METIS", assembly_tree(grid(70, 70), "metis", 0.1)),
        ("grid3d-16 METIS", assembly_tree(grid(16, 16, 16), "metis", 0.1)),
        ("random 2000", random_tree(2000, seed=seed)),
        ("random deep 2000", random_tree(2000, seed=seed, attach="deep")),
    ]
    if folder is not None and (folder / "4elt.graph").exists():
        trees.append(("4elt METIS", assembly_tree(read_metis(folder / "4elt.graph"), "metis", 0.1)))
    rows = []
    for name, graph in trees:
        tree, solution = recognize_tree(graph), solve(graph)
        for processors in (4, 16):
            for factor in (1.0, 1.5, 3.0):
                memory = int(solution.peak_bytes * factor)
                setting = {"tree": name, "P": processors, "memory / least": factor}
                rows += [{**setting, **_one(graph, tree, solution, algorithm, processors, memory)} for algorithm in PARALLEL]
        print(name, file=sys.stderr)
    text = (
        "Makespan over its bound (work / P, and the longest path for tasks on one processor each) and peak over the sequential optimum, both as "
        "judged by the event simulation. Only membooking, safebooking and memory-aware look at the memory; the others are shown once per bound "
        "with what they hold. All-to-all, proportional and memory-aware spread one task over several processors with perfect speed-up, which "
        "flatters them: no communication is modelled, so their makespans are work / P by construction; infeasible means that the mapping's own "
        "start, the best post-order, exceeds the bound."
    )
    write_results(
        "task_parallel", title="P processors within a memory", text=text, columns=list(rows[0]), rows=rows, run=provenance(seed, PACKAGES)
    )


def _one(graph: TaskGraph, tree: Any, solution: Any, algorithm: str, processors: int, memory: int) -> dict[str, Any]:
    from memfit.core import InfeasibleBudget
    from memfit.tasks import makespan_lower_bound

    begin = time.perf_counter()
    try:
        runs = run_parallel(graph, tree, solution, algorithm, processors, memory)
    except InfeasibleBudget:
        return {"algorithm": algorithm, "makespan / bound": "infeasible", "peak / least": "-", "within": "-", "seconds": "-"}
    seconds = time.perf_counter() - begin
    profile = judge_parallel(graph, runs, processors=processors)
    spread = algorithm in ("all-to-all", "proportional", "memory-aware")
    bound = float(graph.time.sum()) / processors if spread else makespan_lower_bound(graph, processors)
    return {
        "algorithm": algorithm, "makespan / bound": f"{profile.makespan / bound:.3f}", "peak / least": f"{profile.peak_bytes / solution.peak_bytes:.3f}",
        "within": "yes" if profile.peak_bytes <= memory else "no", "seconds": f"{seconds:.2f}",
    }  # fmt: skip


def dags(seed: int) -> None:
    """General DAGs: what each algorithm finds, against the best proven bound."""
    from memfit.tasks import random_dag

    rows = []
    for size in (20, 30, 60, 200):
        for algorithm in ("greedy", "beam", "local-search", "exact", "cpsat", "auto"):
            if (algorithm in ("exact", "cpsat") and size > 200) or (algorithm == "cpsat" and size > 60):
                continue
            found = [schedule(random_dag(size, seed=seed + k), algorithm=algorithm, time_limit_s=2) for k in range(3)]
            rows.append(
                {"tasks": size, "algorithm": algorithm, "optimal, proven": f"{sum(o.status == 'OPTIMAL' for o in found)} of 3",
                 "mean peak / own bound": f"{np.mean([o.peak_bytes / o.lower_bound_bytes for o in found]):.3f}",
                 "mean peak": f"{np.mean([o.peak_bytes for o in found]):.0f}", "mean seconds": f"{np.mean([o.seconds for o in found]):.2f}"}
            )  # fmt: skip
            print(rows[-1], file=sys.stderr)
    text = "Random DAGs in which a task reads from about two of the 30 before it; three per size, 2 s of search each at most. Every order is judged."
    write_results(
        "task_dags", title="General DAGs", text=text, columns=list(rows[0]), rows=rows, run=provenance(seed, (*PACKAGES, "ortools"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["speed", "statistics", "harpoon", "parallel", "dags"])
    parser.add_argument(
        "--graphs",
        type=Path,
        default=DEBIAN_GRAPHS if DEBIAN_GRAPHS.is_dir() else None,
        help="Folder of METIS graphs (apt install libmetis-doc).",
    )
    parser.add_argument("--quick", action="store_true", help="Leave the largest matrices out.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(options.graphs, options.seed),
        "statistics": lambda: statistics(options.graphs, options.seed, options.quick),
        "harpoon": lambda: harpoons(options.seed),
        "parallel": lambda: parallel(options.graphs, options.seed),
        "dags": lambda: dags(options.seed),
    }
    for part in options.parts:
        parts[part]()
