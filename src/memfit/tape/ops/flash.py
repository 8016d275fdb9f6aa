"""FlashAttention: exact attention in blocks, never storing S = QKᵀ or P = softmax(S) (Dao et al. 2022; SOURCES D21).

    for each block of rows of Q:                 fast memory holds Q_i, O_i, K_j, V_j and one block of S
        for each block of K, V:
            S    = Q_i K_jᵀ                      online softmax: running maximum m and normalizer l per row
            m'   = max(m, rowmax S)
            O_i  = O_i · exp(m - m') + exp(S - m') V_j
            l    = l · exp(m - m') + rowsum
        O_i /= l;  L_i = m + log l               L (one number per row) is all that backward needs besides O

Backward rebuilds each block of P as exp(S - L). Loop order is FlashAttention-2's: rows outside in forward, columns outside in
backward. The op's scratch is exactly the fast memory. Arrays are (batch, rows, features); scores are not scaled here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node
from memfit.tape.array_view import Data, Spec
from memfit.tape.gradient import vjp_through
from memfit.tape.memory.traffic import Traffic
from memfit.tape.ops.attention import attention_grads, standard_attention


def flash_attention(
    q: Array, k: Array, v: Array, *, block_rows: int = 64, block_columns: int = 64, traffic: Traffic | None = None
) -> Array:
    """softmax(q kᵀ) v over (batch, rows, features), in blocks. `traffic`, if given, counts every run of the op and its gradient."""
    _check(q, k, v, block_rows, block_columns)
    count = traffic or Traffic()
    (batch, n, d), m, dv = q.shape, k.shape[1], v.shape[2]
    rows, columns = min(block_rows, max(n, 1)), min(block_columns, max(m, 1))

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        for one in range(batch):
            forward_blocks([x[one] for x in inputs], [x[one] for x in outputs], scratch, count)

    def vjp(node: Node, u: Sequence[Array | None]) -> Sequence[Array | None]:
        if u[0] is None or u[1] is not None:
            return vjp_through(_attend_in_simple_ops, node, u)
        return _flash_grad([u[0], *node.inputs, *node.outputs], block_rows, block_columns, count)

    specs = [Spec((batch, n, dv), q.dtype), Spec((batch, n, 1), q.dtype)]
    flops = 2 * batch * n * m * (d + dv) + 12 * batch * n * m
    scratch = forward_scratch(rows, columns, d, dv, q)
    return q.tape.apply("flash_attention", [q, k, v], specs, kernel, vjp=vjp, scratch=scratch, flops=flops)[0]


def _check(q: Array, k: Array, v: Array, block_rows: int, block_columns: int) -> None:
    if not (
        q.ndim == k.ndim == v.ndim == 3 and q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] and k.shape[1] == v.shape[1]
    ):
        raise BadInput(f"attention of q {q.shape}, k {k.shape}, v {v.shape}: (batch, rows, features) that fit together are expected.")
    if block_rows < 1 or block_columns < 1:
        raise BadInput(f"attention blocks of {block_rows} by {block_columns}: both must be at least 1.")


def forward_scratch(rows: int, columns: int, d: int, dv: int, like: Array) -> list[Spec]:
    """Fast memory of the forward pass: Q, K, V, O and S blocks; m, l and two rows to work with."""
    shapes = [(rows, d), (columns, d), (columns, dv), (rows, dv), (rows, columns), (rows, 1), (rows, 1), (rows, 1), (rows, 1), (rows, dv)]
    return [Spec(shape, like.dtype) for shape in shapes]


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def forward_blocks(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data], count: Traffic) -> None:
    """One head: inputs Q, K, V; outputs O, L."""
    (q, k, v), (out, lse) = inputs, outputs
    fast_q, fast_k, fast_v, fast_o, fast_s, top, total, new_top, row, part = scratch
    for i in _blocks(q.shape[0], fast_q.shape[0]):
        length = i.stop - i.start
        q_i, o, m, norm, m_new, r, p = (count.read(q[i], fast_q), *(x[:length] for x in (fast_o, top, total, new_top, row, part)))
        o[...], m[...], norm[...] = 0, -np.inf, 0
        for j in _blocks(k.shape[0], fast_k.shape[0]):
            k_j, v_j = count.read(k[j], fast_k), count.read(v[j], fast_v)
            s = _block(fast_s, length, j.stop - j.start)
            np.matmul(q_i, k_j.T, out=s)
            np.maximum.reduce(s, axis=1, keepdims=True, out=m_new)
            np.maximum(m_new, m, out=m_new)
            np.subtract(s, m_new, out=s)
            np.exp(s, out=s)
            np.subtract(m, m_new, out=m)
            np.exp(m, out=m)  # how much the old maximum overstated
            np.multiply(o, m, out=o)
            np.multiply(norm, m, out=norm)
            np.add.reduce(s, axis=1, keepdims=True, out=r)
            np.add(norm, r, out=norm)
            np.matmul(s, v_j, out=p)
            np.add(o, p, out=o)
            np.copyto(m, m_new)
        np.divide(o, norm, out=o)
        np.log(norm, out=norm)
        np.add(norm, m, out=norm)
        count.write(o, out[i])
        count.write(norm, lse[i])


def _block(whole: Data, rows: int, columns: int) -> Data:
    """A short block as a contiguous matrix, so that BLAS takes it as it is."""
    return whole.reshape(-1)[: rows * columns].reshape(rows, columns)


def _flash_grad(inputs: Sequence[Array], block_rows: int, block_columns: int, count: Traffic) -> tuple[Array, ...]:
    g, q, k, v, *_ = inputs
    (batch, n, d), m, dv = q.shape, k.shape[1], v.shape[2]
    rows, columns = min(block_rows, max(n, 1)), min(block_columns, max(m, 1))

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        for one in range(batch):
            backward_blocks([x[one] for x in inputs], [x[one] for x in outputs], scratch, count)

    def vjp(node: Node, u: Sequence[Array | None]) -> Sequence[Array | None]:
        return vjp_through(attention_grads, node, u)

    return g.tape.apply(
        "flash_attention_grad",
        inputs,
        [q.view.spec, k.view.spec, v.view.spec],
        kernel,
        vjp=vjp,
        scratch=backward_scratch(rows, columns, n, d, dv, q),
        flops=2 * batch * n * m * (3 * d + 2 * dv) + 14 * batch * n * m,
    )


def backward_scratch(rows: int, columns: int, n: int, d: int, dv: int, like: Array) -> list[Spec]:
    """Fast memory of the backward pass (Q, dO, O or dQ, K, V, dK, dV, two blocks of S), and D = rowsum(dO ∘ O) in slow memory."""
    shapes = [(rows, d), (rows, dv), (rows, max(d, dv)), (columns, d), (columns, dv), (columns, d), (columns, dv)]
    shapes += [(rows, columns), (rows, columns), (rows, 1), (rows, 1), (columns, max(d, dv)), (n, 1)]
    return [Spec(shape, like.dtype) for shape in shapes]


def backward_blocks(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data], count: Traffic) -> None:
    """One head: inputs dO, Q, K, V, O, L; outputs dQ, dK, dV."""
    (g, q, k, v, o, lse), (dq, dk, dv) = inputs, outputs
    fast_q, fast_g, fast_o, fast_k, fast_v, sum_k, sum_v, fast_s, fast_p, fast_l, fast_d, part, slow_d = scratch
    rows, columns = fast_q.shape[0], fast_k.shape[0]
    for i in _blocks(q.shape[0], rows):  # D = rowsum(dO ∘ O)
        g_i, o_i = count.read(g[i], fast_g), count.read(o[i], _block(fast_o, rows, v.shape[1]))
        np.multiply(g_i, o_i, out=o_i)
        d_i = fast_d[: i.stop - i.start]
        np.add.reduce(o_i, axis=1, keepdims=True, out=d_i)
        count.write(d_i, slow_d[i])
    for j in _blocks(k.shape[0], columns):
        k_j, v_j = count.read(k[j], fast_k), count.read(v[j], fast_v)
        dk_j, dv_j = sum_k[: j.stop - j.start], sum_v[: j.stop - j.start]
        dk_j[...] = dv_j[...] = 0
        for i in _blocks(q.shape[0], rows):
            q_i, g_i = count.read(q[i], fast_q), count.read(g[i], fast_g)
            l_i, d_i = count.read(lse[i], fast_l), count.read(slow_d[i], fast_d)
            s, p = (_block(x, i.stop - i.start, j.stop - j.start) for x in (fast_s, fast_p))
            np.matmul(q_i, k_j.T, out=p)
            np.subtract(p, l_i, out=p)
            np.exp(p, out=p)
            np.matmul(g_i, v_j.T, out=s)
            np.subtract(s, d_i, out=s)
            np.multiply(s, p, out=s)  # dS = P ∘ (dP - D)
            _accumulate(p.T, g_i, dv_j, part)
            _accumulate(s.T, q_i, dk_j, part)
            total = _block(fast_o, i.stop - i.start, q.shape[1])
            np.matmul(s, k_j, out=total)
            if j.start:  # the first column block starts dQ, the others add to it
                np.add(total, count.read(dq[i], fast_q), out=total)
            count.write(total, dq[i])
        count.write(dk_j, dk[j])
        count.write(dv_j, dv[j])


def _accumulate(a: Data, b: Data, total: Data, part: Data) -> None:
    product = _block(part, total.shape[0], total.shape[1])
    np.matmul(a, b, out=product)
    np.add(total, product, out=total)


def _attend_in_simple_ops(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return standard_attention(q, k, v, with_lse=True)
