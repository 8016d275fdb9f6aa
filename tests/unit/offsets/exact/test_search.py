"""Each pruning rule of the exact search shrinks it, and none changes the answer."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.models.offset_instances import cut_anywhere

from memfit.core.packing import Buffer, check_packing
from memfit.offsets.exact.search import Rule, Verdict, start_search
from memfit.offsets.exact.time_sections import make_sections
from memfit.offsets.problem import Problem, lower_bound, make_problem

BASE = Rule.CANONICAL | Rule.SECTION
RULES = [r for r in Rule if r is not Rule.ALL and r not in BASE]
MANY = 200_000


def as_problem(buffers: tuple[Buffer, ...]) -> Problem:
    start, stop, size = np.array([(b.start, b.stop, b.size) for b in buffers], np.int64).T
    return make_problem(start, stop, size)


# some pieces are dropped, so that packings with holes exist and rules about holes have something to do
FAMILY = [as_problem(cut_anywhere(24, seed, length=24, height=24, unit=1, drop=0.12).buffers) for seed in range(12)]


def nodes_and_verdicts(rules: Rule) -> tuple[int, list[Verdict]]:
    total, verdicts = 0, []
    for problem in FAMILY:
        search = start_search(problem, make_sections(problem), lower_bound(problem), rules=rules)
        verdicts.append(search.advance(MANY))
        total += search.nodes
    return total, verdicts


@pytest.fixture(scope="module")
def base() -> tuple[int, list[Verdict]]:
    return nodes_and_verdicts(BASE)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rule_shrinks_the_search_and_keeps_the_answer(rule: Rule, base: tuple[int, list[Verdict]]) -> None:
    nodes, verdicts = nodes_and_verdicts(BASE | rule)
    assert nodes < base[0]
    assert verdicts == base[1]


def test_canonical_shrinks_the_search(base: tuple[int, list[Verdict]]) -> None:
    assert base[0] < nodes_and_verdicts(Rule.SECTION)[0] / 2


def test_sections_shrink_the_search() -> None:
    everything = nodes_and_verdicts(Rule.ALL)
    assert everything[0] < nodes_and_verdicts(Rule.ALL & ~Rule.SECTION)[0] / 2


def test_all_rules_together_beat_each_alone(base: tuple[int, list[Verdict]]) -> None:
    nodes, verdicts = nodes_and_verdicts(Rule.ALL)
    assert verdicts == base[1]
    assert all(nodes <= nodes_and_verdicts(BASE | rule)[0] for rule in RULES)


@pytest.mark.parametrize("rules", [Rule.ALL, BASE, Rule.ALL & ~Rule.PARTITION], ids=["all", "base", "no partition"])
def test_a_packed_search_gives_a_packing(rules: Rule) -> None:
    buffers, capacity = cut_anywhere(30, 5, length=40, height=40, unit=1)
    problem = as_problem(buffers)
    search = start_search(problem, make_sections(problem), capacity, rules=rules)
    assert search.advance(MANY) is Verdict.PACKED
    check_packing(buffers, search.offsets.tolist(), height=capacity)


def test_pausing_changes_nothing() -> None:
    problem = FAMILY[3]
    whole = start_search(problem, make_sections(problem), lower_bound(problem), rules=BASE)
    pieces = start_search(problem, make_sections(problem), lower_bound(problem), rules=BASE)
    verdict = whole.advance(MANY)
    while pieces.advance(1) is Verdict.OPEN:
        pass
    assert (pieces.nodes, pieces.advance(1)) == (whole.nodes, verdict)


def test_plain_python_searches_the_same() -> None:
    for problem in FAMILY[:4]:
        compiled, plain = (start_search(problem, make_sections(problem), lower_bound(problem)) for _ in range(2))
        assert compiled.advance(300) is plain.advance(300, in_python=True)
        assert (compiled.nodes, compiled.deepest) == (plain.nodes, plain.deepest)
        assert (compiled.offsets == plain.offsets).all()


def test_partition_jumps_back_over_the_side_that_is_done() -> None:
    """Two halves joined by one long buffer: once it is placed, a failing half must not re-enumerate the other."""
    easy = [(0, 4, 2), (0, 2, 3), (2, 4, 3), (1, 3, 4), (0, 1, 1), (3, 4, 1)]
    hard = [(5, 7, 3), (6, 8, 3), (7, 9, 3), (5, 9, 2), (5, 6, 4), (8, 9, 4), (6, 7, 1), (7, 8, 1)]
    rows = [(0, 9, 1), *easy, *hard]
    problem = as_problem(tuple(Buffer(id=str(k), start=a, stop=b, size=z) for k, (a, b, z) in enumerate(rows)))
    capacity = lower_bound(problem)
    with_rule = start_search(problem, make_sections(problem), capacity, rules=Rule.CANONICAL | Rule.PARTITION)
    without = start_search(problem, make_sections(problem), capacity, rules=Rule.CANONICAL)
    assert with_rule.advance(MANY) == without.advance(MANY)
    assert with_rule.nodes <= without.nodes


def test_fixed_buffers_are_walked_around() -> None:
    start, stop, size = np.array([(0, 4, 2), (1, 3, 3), (0, 2, 1), (2, 4, 2)], np.int64).T
    problem = make_problem(start, stop, size, fixed=np.array([-1, 1, -1, -1]))
    search = start_search(problem, make_sections(problem), 8)
    assert search.advance(MANY) is Verdict.PACKED
    buffers = [Buffer(id=str(k), start=int(a), stop=int(b), size=int(z)) for k, (a, b, z) in enumerate(zip(start, stop, size, strict=True))]
    offsets = search.offsets.tolist()
    check_packing(buffers, offsets, height=8)
    assert offsets[1] == 1
    # the hole of 1 below the fixed buffer is too low for both that must pass it, so they stack above it: 4 + 2 + 2
    assert start_search(problem, make_sections(problem), 7).advance(MANY) is Verdict.IMPOSSIBLE
