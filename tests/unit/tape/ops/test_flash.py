"""FlashAttention: exact to rounding for any blocks, no S or P in slow memory, and the bytes it moves by the formula."""

from __future__ import annotations

import numpy as np
import pytest

from memfit import tape
from memfit.core.errors import BadInput
from memfit.tape.array import Tape
from memfit.tape.examples.attention_traffic import movement
from memfit.tape.memory.byte_trace import trace
from memfit.tape.memory.traffic import Traffic
from memfit.tape.ops.attention import standard_attention
from memfit.tape.ops.flash import flash_attention
from memfit.tape.plain_schedules import drop_early


def _qkv(n: int, m: int, d: int, batch: int = 2, seed: int = 0) -> tuple[Tape, list[tape.Array]]:
    rng = np.random.default_rng(seed)
    t = Tape()
    return t, [t.parameter(rng.standard_normal((batch, rows, d))) for rows in (n, m, m)]


def test_the_two_block_example_of_the_lecture() -> None:
    """SOURCES D21: scores in two halves, combined by their normalizers, give softmax(s) @ V."""
    np.random.seed(42)
    s = np.random.rand(100)
    v = np.random.randn(100, 3)
    whole = np.exp(s) / np.exp(s).sum() @ v
    t = Tape()
    out = flash_attention(t.array(np.ones((1, 1, 1))), t.array(s.reshape(1, 100, 1)), t.array(v[None]), block_columns=50)
    np.testing.assert_allclose(out.numpy()[0, 0], whole, rtol=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (16, 16), (64, 5), (100, 100)])
def test_every_block_size_gives_attention_and_its_gradients(rows: int, columns: int) -> None:
    t, (q, k, v) = _qkv(17, 23, 4)
    weights = t.array(np.random.default_rng(1).standard_normal((2, 17, 4)))
    tiled = flash_attention(q, k, v, block_rows=rows, block_columns=columns)
    plain = standard_attention(q, k, v)
    ours = tape.evaluate([tiled, *tape.gradients((tiled * weights).sum(), [q, k, v])])
    expected = tape.evaluate([plain, *tape.gradients((plain * weights).sum(), [q, k, v])])
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_large_scores_do_not_overflow() -> None:
    _, (q, k, v) = _qkv(9, 9, 3)
    with np.errstate(over="raise", invalid="raise"):
        out = flash_attention(q * 1e3, k * 1e3, v, block_rows=4, block_columns=4).numpy()
    np.testing.assert_allclose(out, standard_attention(q * 1e3, k * 1e3, v).numpy(), atol=1e-12)


def test_memory_is_linear_in_the_length() -> None:
    peaks = {}
    for n in (128, 256):
        _, (q, k, v) = _qkv(n, n, 4, batch=1)
        for name, op in (("flash", lambda *x: flash_attention(*x, block_rows=16, block_columns=16)), ("standard", standard_attention)):
            out = op(q, k, v)
            program = tape.compile_program([out, *tape.gradients((out * out).sum(), [q, k, v])])
            seen = trace(program, drop_early(program.graph, inplace=True))
            assert seen.predicted_bytes == seen.measured_bytes
            peaks[name, n] = seen.peak_bytes
    assert peaks["flash", 256] < 2.1 * peaks["flash", 128]
    assert peaks["standard", 256] > 3.5 * peaks["standard", 128]


def test_bytes_moved_follow_the_formula() -> None:
    """Counted by the kernels themselves, for blocks that divide the length and blocks that do not."""
    rng = np.random.default_rng(0)
    n, d = 96, 8
    q, k, v, g = (rng.standard_normal((n, d)) for _ in range(4))
    moved = []
    for block in (4, 7, 16, 31, 48, 96, 200):
        m = movement(q, k, v, g, block)
        assert m.standard_forward == m.formula_standard_forward
        assert m.tiled_forward == m.formula_tiled_forward
        assert m.standard_backward == m.formula_standard_backward
        assert m.tiled_backward == m.formula_tiled_backward
        assert m.standard_forward - m.tiled_forward == 8 * (4 * n * n - n), "exactly S and P, less one row of normalizers"
        assert m.largest_difference < 1e-12
        moved.append(m.tiled_forward)
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 8 * (4 * n * d + n), "everything read once, O and L written once"


def test_the_op_counts_its_own_runs() -> None:
    traffic = Traffic()
    _, (q, k, v) = _qkv(32, 32, 4, batch=3)
    out = flash_attention(q, k, v, block_rows=8, block_columns=8, traffic=traffic)
    assert traffic.moved_bytes == 0
    out.numpy()
    assert traffic.moved_bytes == 3 * 8 * (2 * 32 * 4 + 2 * 4 * 32 * 4 + 32)


def test_misfits_are_refused() -> None:
    _, (q, k, v) = _qkv(4, 5, 2)
    with pytest.raises(BadInput, match="fit together"):
        flash_attention(q, q, v)
    with pytest.raises(BadInput, match="at least 1"):
        flash_attention(q, k, v, block_rows=0)
    with pytest.raises(BadInput, match="four equal"):
        movement(np.ones((2, 2)), np.ones((3, 2)), np.ones((3, 2)), np.ones((2, 2)), 1)
