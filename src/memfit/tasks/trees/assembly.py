"""Assembly trees: the task graph of a multifrontal factorization, from the pattern of a sparse matrix.

    matrix A ── fill-reducing ordering ── elimination tree ── column counts ── amalgamation ──> assembly tree

A node eliminates `eta` columns of a front of order `mu`: it leaves a contribution block of (mu - eta)² entries for its
parent and needs the rest of the front while it works. Times are the flops of the partial factorization.

                front     eta   mu - eta
                        ┌─────┬─────────┐       output_bytes = 8 (mu - eta)²
                   eta  │  L  │    U    │       memory_bytes = 8 (mu² - (mu - eta)²)
                        ├─────┼─────────┤
               mu - eta │  L  │ contrib │
                        └─────┴─────────┘
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.jit.kernel import kernel_above
from memfit.tasks.graph import COMPILE_FROM, Ints, TaskGraph
from memfit.tasks.trees.orderings import fill_reducing
from memfit.tasks.trees.tree import tree_graph

_ENTRY_BYTES = 8


def assembly_tree(matrix: Any, ordering: str | Ints = "metis", amalgamation: float | None = 0.0) -> TaskGraph:
    """`matrix`: square scipy.sparse, only its pattern counts (of A + Aᵀ). `ordering`: metis, amd, rcm, natural or a permutation.

    `amalgamation`: None keeps one node per column; 0 merges a column into its only child when that adds no zero (fundamental
    supernodes); a fraction merges further, while the zeros added stay below that fraction of the merged front.
    """
    pattern = _pattern(matrix)
    n = pattern.shape[0]
    perm = fill_reducing(pattern, ordering) if isinstance(ordering, str) else np.asarray(ordering, np.int64)
    if len(perm) != n or not np.array_equal(np.sort(perm), np.arange(n)):
        raise BadInput(f"the ordering has {len(perm)} entries, the matrix {n} columns: a permutation of all columns is expected.")
    if amalgamation is not None and not 0 <= amalgamation < 1:
        raise BadInput(f"amalgamation {amalgamation} is not a fraction: give None, or a number from 0 up to 1.")
    ordered = pattern[perm][:, perm].tocsr()
    ordered.sort_indices()
    indptr, indices = ordered.indptr.astype(np.int64), ordered.indices.astype(np.int64)
    parent, counts = np.full(n, -1, np.int64), np.ones(n, np.int64)
    _elimination(indptr, indices, parent, counts)
    columns = np.ones(n, np.int64)
    if amalgamation is not None:
        parent, columns, counts = _amalgamate(parent, counts, amalgamation)
    return _make_tasks(parent, columns, counts)


def _pattern(matrix: Any) -> Any:
    import scipy.sparse as sparse

    if not sparse.issparse(matrix) or matrix.shape[0] != matrix.shape[1]:
        shape = getattr(matrix, "shape", type(matrix).__name__)
        raise BadInput(f"an assembly tree needs a square scipy.sparse matrix, not {shape}.")
    coo = matrix.tocoo()
    off = coo.row != coo.col
    row, col = coo.row[off], coo.col[off]
    ones = np.ones(2 * len(row), np.int8)
    pattern = sparse.csr_matrix((ones, (np.concatenate([row, col]), np.concatenate([col, row]))), shape=matrix.shape)
    pattern.sum_duplicates()
    return pattern


@kernel_above(COMPILE_FROM)
def _elimination(indptr: Ints, indices: Ints, parent: Ints, counts: Ints) -> None:
    """Liu's elimination tree with path compression, and the size of every column of the factor, row by row.

    Row i of the factor is the part of the tree reached from the columns of row i of A: walking it up to what this row has
    already marked counts each entry once.
    """
    n = len(parent)
    ancestor = np.full(n, -1, np.int64)
    for i in range(n):
        for at in range(indptr[i], indptr[i + 1]):
            k = indices[at]
            while k != -1 and k < i:
                following = ancestor[k]
                ancestor[k] = i
                if following == -1:
                    parent[k] = i
                k = following
    mark = np.full(n, -1, np.int64)
    for i in range(n):
        mark[i] = i
        for at in range(indptr[i], indptr[i + 1]):
            k = indices[at]
            while k < i and mark[k] != i:
                counts[k] += 1
                mark[k] = i
                k = parent[k]


def _amalgamate(parent: Ints, counts: Ints, fraction: float) -> tuple[Ints, Ints, Ints]:
    """Merge children into parents from the leaves up. Returns parent, columns and front order of what is left."""
    n = len(parent)
    owner = np.arange(n)
    columns, order = np.ones(n, np.int64), counts.copy()  # order of the front of the merged node, at its topmost column
    children = np.bincount(parent[parent >= 0], minlength=n)
    zeros = np.zeros(n, np.int64)
    _merge(parent, owner, columns, order, children, zeros, fraction)
    keep = np.flatnonzero(owner == np.arange(n))
    number = np.full(n, -1, np.int64)
    number[keep] = np.arange(len(keep))
    top = parent[keep]
    up = np.where(top >= 0, number[_find(owner, np.maximum(top, 0))], -1)
    return up, columns[keep], order[keep]


def _find(owner: Ints, nodes: Ints) -> Ints:
    """Follow merges to the node that took over."""
    found = owner[nodes]
    while not np.array_equal(found, owner[found]):
        found = owner[found]
    return found


@kernel_above(COMPILE_FROM)
def _merge(parent: Ints, owner: Ints, columns: Ints, order: Ints, children: Ints, zeros: Ints, fraction: float) -> None:
    """`owner[c] = p` when child c was merged into p; columns are numbered so that children come before parents.

    Without a fraction only an only child whose front fits exactly is merged; with one, any child whose merging keeps the zeros
    stored below that fraction of the merged front.
    """
    for c in range(len(parent)):
        p = parent[c]
        if p < 0:
            continue
        front = order[p] + columns[c]
        if children[p] == 1 and order[c] == front:
            owner[c] = p
        elif fraction > 0:
            added = zeros[c] + zeros[p] + (front - order[c]) * columns[c]
            if added <= fraction * front * (columns[c] + columns[p]):
                owner[c] = p
                zeros[p] = added
        if owner[c] == p:
            columns[p] += columns[c]
            order[p] = front
            children[p] += children[c] - 1


def _make_tasks(parent: Ints, columns: Ints, order: Ints) -> TaskGraph:
    rest = order - columns
    eta, mu = columns.astype(np.float64), order.astype(np.float64)
    flops = 2 / 3 * eta**3 + eta**2 * (mu - eta) + eta * (mu - eta) ** 2
    return tree_graph(parent, _ENTRY_BYTES * rest**2, _ENTRY_BYTES * (order**2 - rest**2), np.maximum(flops, 1.0))
