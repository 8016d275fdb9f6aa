"""Operator variants in the planner: never a worse plan than without, bounds as tight, in-place forms only where they are legal."""

from __future__ import annotations

import os
from random import Random

import numpy as np
import pytest

import memfit
from memfit.core.costs import Costs
from memfit.core.simulate import simulate
from memfit.planning import plan
from memfit.planning.cuts.milp import redirect_stdout
from memfit.planning.cuts.near_peak import cuts_near_peak
from memfit.planning.cuts.program import CutProgram
from memfit.planning.model.fast_judge import INVALID, peak_and_time
from memfit.planning.model.inplace_forms import find_siblings, use_inplace
from memfit.planning.model.reduce import build_model
from memfit.planning.model.to_schedule import schedule_of


def _layers(num_layers: int, *, inplace: bool, seed: int = 0) -> tuple[memfit.Graph, Costs]:
    """Two ops a layer, the second pointwise (it may overwrite its input); backward of each reads what it made."""
    rng = Random(seed)
    sizes, ops = [10], []
    for _ in range(num_layers):
        size = rng.randint(8, 20)
        for pointwise in (False, True):
            sizes.append(size)
            ops.append((len(sizes) - 2, len(sizes) - 1, pointwise))
    wired: list[memfit.Op] = []
    times: list[int] = []

    def add(inputs: tuple[int, ...], over: int | None) -> int:
        made = len(sizes) if len(wired) >= len(ops) else ops[len(wired)][1]
        if made == len(sizes):
            sizes.append(sizes[inputs[0]])
        variants = ()
        if inplace and over is not None:
            variants = (memfit.Variant(name="in place", inputs=inputs, outputs=(made,), inplace_of=((made, over),)),)
        wired.append(memfit.Op(id=len(wired), name="op", inputs=inputs, outputs=(made,), variants=variants))
        times.append(3 if over is not None else rng.randint(5, 30))
        return made

    for read, _, pointwise in ops:
        add((read,), read if pointwise and read else None)
    gradient = ops[-1][1]
    for read, made, pointwise in reversed(ops):
        gradient = add((gradient, made if pointwise else read), gradient if pointwise and gradient != ops[-1][1] else None)
    storages = tuple(memfit.Storage(id=i, size_bytes=x) for i, x in enumerate(sizes))
    tensors = tuple(memfit.Tensor(id=i, storage=i) for i in range(len(sizes)))
    graph = memfit.Graph(ops=tuple(wired), tensors=tensors, storages=storages, sources=(0,), results=(0, gradient))
    costs = Costs(
        op_time_ns=tuple(times),
        workspace_bytes=(0,) * len(wired),
        variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(times, wired, strict=True)),
        variant_workspace_bytes=tuple((0,) * len(op.variants) for op in wired),
        device="test",
        graph_digest=graph.digest,
    )
    return graph, costs


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_variants_only_help(share: float) -> None:
    plain, plain_costs = _layers(10, inplace=False)
    both, both_costs = _layers(10, inplace=True)
    limit = int(share * plan(plain, plain_costs, planner="keep_all").require_plan().timeline.peak_bytes)
    without = plan(plain, plain_costs, limit, time_limit_s=5)
    offered = plan(both, both_costs, limit, time_limit_s=5)
    assert offered.require_plan().timeline.time_ns <= without.require_plan().timeline.time_ns
    assert offered.lower_bound_ns <= without.require_plan().timeline.time_ns


def test_a_choice_of_forms_does_not_halve_what_they_read() -> None:
    """Half a run of each of two forms must not get by with half of the input both read: the bound stays where it was."""
    plain, plain_costs = _layers(10, inplace=False)
    both, both_costs = _layers(10, inplace=True)
    models = [build_model(plain, plain_costs), build_model(both, both_costs)]
    peak, base = peak_and_time(models[0].arrays, np.array(models[0].agenda, np.int64))
    bounds = []
    for model in models:
        cut = next(cuts_near_peak(model))
        solution = CutProgram(model, (cut,)).solve(int(0.6 * peak))
        assert solution is not None
        bounds.append(solution.bound_ns - base)
    assert bounds[0] > 0
    assert bounds[1] > 0.6 * bounds[0]  # what remains is what in-place forms really save at the cut


def test_overwriting_is_legal_and_never_holds_more() -> None:
    changed = 0
    for seed in range(30):
        graph, costs = _layers(6, inplace=True, seed=seed)
        model = build_model(graph, costs)
        siblings = find_siblings(model)
        rng = np.random.default_rng(seed)
        sequence = np.array(model.agenda, np.int64)
        for _ in range(5):  # repeats read what came before
            at = int(rng.integers(1, len(sequence)))
            sequence = np.insert(sequence, at, sequence[int(rng.integers(0, at))])
        before = peak_and_time(model.arrays, sequence)
        after = use_inplace(model.arrays, sequence, siblings)
        peak, time = peak_and_time(model.arrays, after)
        assert before[0] != INVALID
        assert peak != INVALID
        assert (peak, time) <= before
        assert simulate(graph, schedule_of(model, after), costs).peak_bytes <= before[0]
        changed += not np.array_equal(after, sequence)
        assert np.array_equal(siblings.plain[after], sequence)
    assert changed == 30


def test_the_solver_prints_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_stdout():
        os.write(1, b"a line of the solver's own\n")
    os.write(1, b"data\n")
    captured = capfd.readouterr()
    assert captured.out == "data\n"
    assert "solver's own" in captured.err
