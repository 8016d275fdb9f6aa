"""Bytes that attention moves between slow and fast memory: standard against tiled, counted and by formula (SOURCES D21).

    fast memory of M bytes ──> blocks of B rows and columns       N rows, d features, T = ⌈N / B⌉ blocks

    standard, forward    2Nd + 2TNd + 4N²       S and P written and read once each; K and V read once per row block
    tiled, forward       2Nd + 2TNd + N         the same loops, but S and P never leave fast memory: 4N² - N fewer
                         = Θ(N²d²/M) for B ~ M/d
    at least, standard   4Nd + 4N²              with fast memory large enough to read every matrix once

Counts are in elements; `itemsize` turns them into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Tape
from memfit.tape.array_view import Data, Spec
from memfit.tape.memory.traffic import Traffic
from memfit.tape.ops.flash import backward_blocks, backward_scratch, forward_blocks, forward_scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """One block size: bytes counted while running, and bytes by formula."""

    block: int
    fast_bytes: int
    standard_forward: int
    tiled_forward: int
    standard_backward: int
    tiled_backward: int
    formula_standard_forward: int
    formula_tiled_forward: int
    formula_standard_backward: int
    formula_tiled_backward: int
    largest_difference: float


def movement(q: Data, k: Data, v: Data, g: Data, block: int) -> Movement:
    """Run all four versions on one head, blocks of `block` rows and columns, and count."""
    if q.ndim != 2 or q.shape != k.shape or q.shape != v.shape or q.shape != g.shape:
        raise BadInput(
            f"movement of q {q.shape}, k {k.shape}, v {v.shape}, g {g.shape}: four equal (rows, features) matrices are expected."
        )
    (n, d), item = q.shape, q.itemsize
    block = min(block, n)
    tiled_f, tiled_b, standard_f, standard_b = (Traffic() for _ in range(4))
    out, lse = np.empty_like(v), np.empty((n, 1), q.dtype)
    like = Tape(q.dtype).array(q)
    specs = forward_scratch(block, block, d, d, like)
    forward_blocks([q, k, v], [out, lse], _scratch(specs), tiled_f)
    tiled = [np.empty_like(q) for _ in range(3)]
    backward_blocks([g, q, k, v, out, lse], tiled, _scratch(backward_scratch(block, block, n, d, d, like)), tiled_b)
    out_standard, p = standard_forward(q, k, v, block, standard_f)
    plain = standard_backward(g, q, k, v, p, block, standard_b)
    pairs = zip((out, *tiled), (out_standard, *plain), strict=True)
    return Movement(
        block=block,
        fast_bytes=sum(s.nbytes for s in specs),
        standard_forward=standard_f.moved_bytes,
        tiled_forward=tiled_f.moved_bytes,
        standard_backward=standard_b.moved_bytes,
        tiled_backward=tiled_b.moved_bytes,
        formula_standard_forward=item * count_standard_forward(n, d, block),
        formula_tiled_forward=item * count_tiled_forward(n, d, block),
        formula_standard_backward=item * count_standard_backward(n, d, block),
        formula_tiled_backward=item * count_tiled_backward(n, d, block),
        largest_difference=max(float(np.abs(a - b).max()) for a, b in pairs),
    )


def _scratch(specs: list[Spec]) -> list[Data]:
    return [np.empty(s.shape, s.dtype) for s in specs]


def count_standard_forward(n: int, d: int, block: int) -> int:
    return 2 * n * d + 2 * -(-n // block) * n * d + 4 * n * n


def count_tiled_forward(n: int, d: int, block: int) -> int:
    return 2 * n * d + 2 * -(-n // block) * n * d + n


def count_standard_backward(n: int, d: int, block: int) -> int:
    """dV = PᵀdO, dP = dO Vᵀ, D = rowsum(P ∘ dP), dS = P ∘ (dP - D), dQ = dS K, dK = dSᵀ Q, each from slow memory to slow memory."""
    blocks = -(-n // block)
    products = 3 * (n * n + blocks * n * d + n * d)  # dV, dQ, dK: a matrix of N² once, the other once per block, the result
    return products + (n * d + blocks * n * d + n * n) + 3 * n * n


def count_tiled_backward(n: int, d: int, block: int) -> int:
    """D first; then per column block: K, V once; Q, dO, L, D and dQ for every row block; dK, dV once."""
    blocks = -(-n // block)
    return (2 * n * d + n) + 2 * n * d + blocks * (2 * n * d + 2 * n) + (2 * blocks - 1) * n * d + 2 * n * d


def standard_forward(q: Data, k: Data, v: Data, block: int, count: Traffic) -> tuple[Data, Data]:
    """Algorithm 0 of the paper with the same blocks: S and P go through slow memory."""
    n = q.shape[0]
    s, p, out = np.empty((n, n), q.dtype), np.empty((n, n), q.dtype), np.empty_like(v)
    _product(q, k.T, s, block, count)
    fast = np.empty((block, n), q.dtype)
    for i in range(0, n, block):
        rows = count.read(s[i : i + block], fast)
        np.subtract(rows, rows.max(axis=1, keepdims=True), out=rows)
        np.exp(rows, out=rows)
        np.divide(rows, rows.sum(axis=1, keepdims=True), out=rows)
        count.write(rows, p[i : i + block])
    _product_wide(p, v, out, block, count)
    return out, p


def standard_backward(g: Data, q: Data, k: Data, v: Data, p: Data, block: int, count: Traffic) -> tuple[Data, Data, Data]:
    n = q.shape[0]
    dq, dk, dv, dp, ds = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(p), np.empty_like(p)
    _product_wide(p.T, g, dv, block, count)
    _product(g, v.T, dp, block, count)
    fast_p, fast_d = np.empty((block, n), q.dtype), np.empty((block, n), q.dtype)
    for i in range(0, n, block):
        rows, part = count.read(p[i : i + block], fast_p), count.read(dp[i : i + block], fast_d)
        count.write(rows * (part - (rows * part).sum(axis=1, keepdims=True)), ds[i : i + block])
    _product_wide(ds, k, dq, block, count)
    _product_wide(ds.T, q, dk, block, count)
    return dq, dk, dv


def _product(a: Data, b: Data, out: Data, block: int, count: Traffic) -> None:
    """N×d times d×N: a once, b once per row block, the result once."""
    fast_a, fast_b = np.empty((block, a.shape[1]), a.dtype), np.empty((b.shape[0], block), b.dtype)
    for i in range(0, a.shape[0], block):
        rows = count.read(a[i : i + block], fast_a)
        for j in range(0, b.shape[1], block):
            count.write(rows @ count.read(b[:, j : j + block], fast_b), out[i : i + block, j : j + block])


def _product_wide(a: Data, b: Data, out: Data, block: int, count: Traffic) -> None:
    """N×N times N×d: a once, b once per row block, the result once."""
    fast_a, fast_b = np.empty((block, block), a.dtype), np.empty((block, b.shape[1]), b.dtype)
    for i in range(0, a.shape[0], block):
        total = np.zeros((min(block, a.shape[0] - i), b.shape[1]), a.dtype)
        for j in range(0, a.shape[1], block):
            total += count.read(a[i : i + block, j : j + block], fast_a) @ count.read(b[j : j + block], fast_b)
        count.write(total, out[i : i + block])
