"""Fill-reducing orderings of a symmetric sparsity pattern. METIS and AMD come with the extra `sparse`."""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.core.errors import BadInput, Unsupported
from memfit.tasks.graph import Ints

ORDERINGS = ("metis", "amd", "rcm", "natural")


def fill_reducing(pattern: Any, ordering: str) -> Ints:
    """`perm[k]` is the column eliminated k-th. `pattern` is a symmetric scipy CSR matrix without diagonal."""
    if ordering == "natural":
        return np.arange(pattern.shape[0])
    if ordering == "rcm":
        from scipy.sparse.csgraph import reverse_cuthill_mckee

        return np.asarray(reverse_cuthill_mckee(pattern, symmetric_mode=True), np.int64)
    if ordering == "metis":
        return _metis(pattern)
    if ordering == "amd":
        return _amd(pattern)
    raise BadInput(f"ordering {ordering!r} is unknown: choose one of {', '.join(ORDERINGS)}, or give a permutation.")


def _metis(pattern: Any) -> Ints:
    try:
        import pymetis
    except ImportError:
        raise Unsupported("ordering 'metis' needs pymetis: pip install 'memfit[sparse]', or choose 'rcm' or 'natural'.") from None
    perm, _ = pymetis.nested_dissection(xadj=pattern.indptr.tolist(), adjncy=pattern.indices.tolist())
    return np.asarray(perm, np.int64)


def _amd(pattern: Any) -> Ints:
    try:
        from cvxopt import amd, spmatrix
    except ImportError:
        raise Unsupported("ordering 'amd' needs cvxopt: pip install 'memfit[sparse]', or choose 'rcm' or 'natural'.") from None
    import scipy.sparse as sparse

    lower = sparse.tril(pattern + sparse.identity(pattern.shape[0], format="csr"), format="coo")
    matrix = spmatrix(1.0, lower.row.tolist(), lower.col.tolist(), pattern.shape)
    return np.asarray(amd.order(matrix), np.int64).ravel()
