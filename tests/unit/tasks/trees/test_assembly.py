"""Assembly trees: against a dense symbolic factorization, for every ordering."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sparse

from memfit.core import BadInput
from memfit.tasks import assembly_tree, liu_order, recognize_tree


def _grid(side: int) -> sparse.csr_matrix:
    line = sparse.diags([1, 1], [-1, 1], shape=(side, side))
    eye = sparse.identity(side)
    return sparse.csr_matrix(sparse.kron(line, eye) + sparse.kron(eye, line) + sparse.identity(side * side))


def _dense_fill(matrix: sparse.csr_matrix) -> tuple[list[int], list[int]]:
    """Parent and column count by eliminating a dense boolean matrix."""
    filled = matrix.toarray() != 0
    filled |= filled.T
    n = len(filled)
    parents, counts = [], []
    for k in range(n):
        below = [i for i in range(k + 1, n) if filled[i, k]]
        parents.append(below[0] if below else -1)
        counts.append(1 + len(below))
        for i in below:
            filled[i, below] = True
    return parents, counts


@pytest.mark.parametrize("seed", range(5))
def test_one_node_per_column_is_the_elimination_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = sparse.random(25, 25, density=0.08, random_state=rng, format="csr")
    parents, counts = _dense_fill(matrix)
    graph = assembly_tree(matrix, "natural", amalgamation=None)
    assert {tuple(e) for e in graph.edges.tolist()} == {(k, p) for k, p in enumerate(parents) if p >= 0}
    assert graph.output_bytes.tolist() == [8 * (c - 1) ** 2 for c in counts]
    assert graph.memory_bytes.tolist() == [8 * (c**2 - (c - 1) ** 2) for c in counts]


@pytest.mark.parametrize("ordering", ["metis", "amd", "rcm", "natural"])
def test_amalgamation_shrinks_the_tree_and_keeps_all_columns(ordering: str) -> None:
    pytest.importorskip({"metis": "pymetis", "amd": "cvxopt"}.get(ordering, "scipy"))
    matrix = _grid(18)
    sizes = []
    for amalgamation in (None, 0.0, 0.2, 0.6):
        graph = assembly_tree(matrix, ordering, amalgamation)
        tree = recognize_tree(graph)
        assert tree is not None
        assert liu_order(tree)[1] > 0
        sizes.append(graph.num_tasks)
    assert sizes[0] == 18 * 18
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] < sizes[0]


def test_perfect_amalgamation_of_a_dense_matrix_is_one_front() -> None:
    graph = assembly_tree(sparse.csr_matrix(np.ones((6, 6))), "natural")
    assert graph.num_tasks == 1
    assert (graph.output_bytes.tolist(), graph.memory_bytes.tolist()) == ([0], [8 * 36])


def test_a_given_permutation_and_bad_input() -> None:
    matrix = _grid(3)
    assert assembly_tree(matrix, np.arange(9), None).num_tasks == 9
    for bad in ({"ordering": "magic"}, {"ordering": np.zeros(9, int)}, {"amalgamation": 1.5}):
        with pytest.raises(BadInput):
            assembly_tree(matrix, **{"ordering": "natural", **bad})
    for wrong in (np.ones((3, 3)), sparse.csr_matrix((2, 3))):
        with pytest.raises(BadInput, match="square"):
            assembly_tree(wrong, "natural")
