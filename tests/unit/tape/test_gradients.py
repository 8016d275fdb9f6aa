"""Every op's first and second derivatives against finite differences, and the founding documents' worked examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from memfit import tape
from memfit.core.errors import BadInput, Unsupported
from memfit.tape.array import Array, Tape
from memfit.tape.ops import activations, attention, conv, elementwise, flash, gather, linear, norm, pool2d, reduce, views
from memfit.tape.ops import dropout as random
from memfit.tape.ops.broadcast import broadcast_to, copy, reshape, sum_over

Build = Callable[..., Array]
POSITIVE = "positive"

OPS: dict[str, tuple[Build, Sequence[tuple[int, ...]], str]] = {
    "add_broadcast": (lambda a, b: a + b, [(3, 4), (4,)], ""),
    "subtract_broadcast": (lambda a, b: a - b, [(3, 1), (1, 4)], ""),
    "multiply_broadcast": (lambda a, b: a * b, [(2, 3, 4), (3, 1)], ""),
    "multiply_itself": (lambda a: a * a, [(3, 4)], ""),
    "divide": (lambda a, b: a / b, [(3, 4), (4,)], POSITIVE),
    "scalars": (lambda a: 3.0 - (2.0 * a + 1.0) / 4.0 - a, [(3,)], ""),
    "reciprocal": (lambda a: 2.0 / a, [(3,)], POSITIVE),
    "exp": (elementwise.exp, [(3, 4)], ""),
    "log": (elementwise.log, [(3, 4)], POSITIVE),
    "sin": (elementwise.sin, [(5,)], ""),
    "cos": (elementwise.cos, [(5,)], ""),
    "sqrt": (elementwise.sqrt, [(5,)], POSITIVE),
    "square": (lambda a: a**2, [(5,)], ""),
    "cube": (lambda a: a**3, [(5,)], POSITIVE),
    "relu": (activations.relu, [(4, 5)], ""),
    "tanh": (activations.tanh, [(4, 5)], ""),
    "sigmoid": (activations.sigmoid, [(4, 5)], ""),
    "gelu": (activations.gelu, [(4, 5)], ""),
    "softmax": (activations.softmax, [(3, 5)], ""),
    "log_softmax": (activations.log_softmax, [(3, 5)], ""),
    "sum_axis": (lambda a: sum_over(a, 1), [(2, 3, 4)], ""),
    "mean_axes": (lambda a: reduce.mean_over(a, (0, 2), keepdims=True), [(2, 3, 4)], ""),
    "broadcast": (lambda a: broadcast_to(a, (3, 2, 4)), [(2, 1)], ""),
    "transpose": (lambda a: views.transpose(a, (2, 0, 1)) * 2.0, [(2, 3, 4)], ""),
    "reshape_of_transpose": (lambda a: reshape(a.T, (2, 6)), [(3, 4)], ""),
    "copy": (copy, [(3, 4)], ""),
    "index": (lambda a: a[1:, ..., 2], [(3, 2, 4)], ""),
    "split": (lambda a: views.split(a, 3)[0] * views.split(a, 3)[2], [(2, 6)], ""),
    "concatenate": (lambda a, b: views.concatenate([a, b, a], 1), [(2, 3), (2, 1)], ""),
    "stack": (lambda a, b: views.stack([a, b], 1), [(2, 3), (2, 3)], ""),
    "matmul": (linear.matmul, [(3, 4), (4, 2)], ""),
    "matmul_transposed": (lambda a, b: a.T @ b.T, [(4, 3), (2, 4)], ""),
    "matmul_batched": (linear.matmul, [(2, 3, 4), (2, 4, 2)], ""),
    "matmul_broadcast": (linear.matmul, [(2, 1, 3, 4), (3, 4, 2)], ""),
    "matmul_folded": (linear.matmul, [(2, 3, 4), (4, 2)], ""),
    "linear": (linear.linear, [(3, 4), (4, 2), (2,)], ""),
    "conv": (lambda x, w: conv.conv2d(x, w, stride=2, padding=1), [(2, 3, 5, 4), (2, 3, 3, 2)], ""),
    "conv_1x1": (conv.conv2d, [(2, 3, 3, 3), (4, 3, 1, 1)], ""),
    "max_pool": (lambda x: pool2d.max_pool2d(x, 3, 2), [(2, 2, 5, 6)], ""),
    "avg_pool": (lambda x: pool2d.avg_pool2d(x, 2), [(2, 2, 4, 5)], ""),
    "batch_norm": (lambda x, g, b: norm.batch_norm(x, g, b)[0], [(3, 2, 2, 2), (2,), (2,)], ""),
    "batch_norm_statistics": (lambda x, g, b: norm.batch_norm(x, g, b)[2] * norm.batch_norm(x, g, b)[1], [(4, 2), (2,), (2,)], ""),
    "layer_norm": (norm.layer_norm, [(2, 3, 4), (4,), (4,)], ""),
    "attention": (attention.standard_attention, [(2, 3, 2), (2, 4, 2), (2, 4, 3)], ""),
    "flash": (lambda q, k, v: flash.flash_attention(q, k, v, block_rows=2, block_columns=3), [(2, 3, 2), (2, 4, 2), (2, 4, 3)], ""),
    "take_rows": (lambda a: gather.take_rows(a, a.tape.array([[0, 2], [2, 1]])), [(4, 3)], ""),
    "pick": (lambda a: gather.pick(a, a.tape.array([1, 0, 4])), [(3, 5)], ""),
    "cross_entropy": (lambda a: gather.cross_entropy(a, a.tape.array([1, 0, 4])), [(3, 5)], ""),
    "dropout": (lambda a: random.dropout(a, 0.4, a.tape.array([7])), [(4, 5)], ""),
}  # fmt: skip


def _setup(name: str) -> tuple[Tape, list[Array], Array]:
    build, shapes, domain = OPS[name]
    rng = np.random.default_rng(len(name))
    t = Tape()
    leaves = []
    for shape in shapes:
        data = rng.standard_normal(shape)
        leaves.append(t.parameter(np.abs(data) + 0.5 if domain == POSITIVE else data))
    out = build(*leaves)
    weights = t.array(rng.standard_normal(out.shape))
    return t, leaves, sum_over(out * weights + out * out * 0.5)


def _difference(run: Callable[[], np.ndarray], leaf: Array, step: float = 1e-6) -> np.ndarray:
    """Central differences of `run` (any shape) with respect to every entry of a leaf: shape out.shape + leaf.shape."""
    columns = []
    flat = leaf.data.reshape(-1)
    for k in range(flat.size):
        before = flat[k]
        flat[k] = before + step
        up = run()
        flat[k] = before - step
        down = run()
        flat[k] = before
        columns.append((up - down) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*columns[0].shape, *leaf.shape)


@pytest.mark.parametrize("name", OPS)
def test_gradient_equals_finite_differences(name: str) -> None:
    _, leaves, loss = _setup(name)
    for leaf, gradient in zip(leaves, tape.gradients(loss, leaves), strict=True):
        np.testing.assert_allclose(gradient.numpy(), _difference(loss.numpy, leaf), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPS)
def test_second_derivative_equals_finite_differences_of_the_first(name: str) -> None:
    t, leaves, loss = _setup(name)
    rng = np.random.default_rng(1)
    first = tape.gradients(loss, leaves)
    mixed = sum((sum_over(g * t.array(rng.standard_normal(g.shape))) for g in first), start=t.array(0.0))
    for leaf, second in zip(leaves, tape.gradients(mixed, leaves), strict=True):
        np.testing.assert_allclose(second.numpy(), _difference(mixed.numpy, leaf, 1e-5), rtol=2e-4, atol=2e-5)


def test_the_lecture_example() -> None:
    """SOURCES A1: y = ln x1 + x1 x2 - sin x2 at (2, 5)."""
    t = Tape()
    x1, x2 = t.parameter(2.0), t.parameter(5.0)
    y = elementwise.log(x1) + x1 * x2 - elementwise.sin(x2)
    d1, d2 = tape.gradients(y)
    assert round(float(y.numpy()), 3) == 11.652
    assert float(d1.numpy()) == 5.5
    assert round(float(d2.numpy()), 3) == 1.716


def test_adjoints_are_nodes_of_the_same_graph() -> None:
    t = Tape()
    a, b = t.parameter(2.0), t.parameter(3.0)
    y = elementwise.exp(a * b + 3.0)
    before = len(t.nodes)
    gradients = tape.gradients(y)
    assert len(t.nodes) > before
    program = tape.compile_program([y, *gradients])
    assert [op.name for op in program.graph.ops] == ["multiply", "add_scalar", "exp", "one", "multiply", "multiply", "multiply"]


def test_backward_declares_only_true_dependencies() -> None:
    """exp, tanh and relu differentiate from their output: their input dies in the forward pass."""
    for op in (elementwise.exp, activations.tanh, activations.sigmoid, activations.relu, activations.softmax):
        t = Tape()
        x = t.parameter(np.ones((2, 3)))
        inner = x * 2.0
        program = tape.compile_program([*tape.gradients(sum_over(op(inner) * t.array(np.ones((2, 3)))))])
        inner_tensor = program.graph.ops[0].outputs[0]
        assert len(program.graph.readers[inner_tensor]) == 1, op


def test_fan_out_sums_partial_adjoints() -> None:
    t = Tape()
    x = t.parameter(3.0)
    (g,) = tape.gradients(x * x + x * 2.0 + x)
    assert float(g.numpy()) == 9.0


def test_hessian_and_hessian_vector_products() -> None:
    """f = Σ (A x)^3 has Hessian 6 Aᵀ diag(A x) A."""
    rng = np.random.default_rng(0)
    a, x, v = rng.standard_normal((4, 3)), rng.standard_normal((3, 1)), rng.standard_normal((3, 1))
    t = Tape()
    xs = t.parameter(x)
    y = ((t.array(a) @ xs) ** 3).sum()
    expected = 6 * a.T @ np.diag((a @ x)[:, 0]) @ a
    full = tape.hessian(y, xs).numpy()
    assert full.shape == (3, 1, 3, 1)
    np.testing.assert_allclose(full.reshape(3, 3), expected)
    np.testing.assert_allclose(tape.hessian_vector(y, xs, t.array(v)).numpy(), expected @ v)
    third = tape.gradients(sum_over(tape.hessian_vector(y, xs, t.array(v))), [xs])[0]
    np.testing.assert_allclose(third.numpy(), _third(a, v))


def _third(a: np.ndarray, v: np.ndarray) -> np.ndarray:
    """d/dx of Σ_k (H v)_k = Σ_i 6 (a_i·v)(Σ_k a_ik) a_i"""
    return 6 * a.T @ ((a @ v) * a.sum(axis=1, keepdims=True))


def test_requires_grad_decides_what_is_differentiated() -> None:
    t = Tape()
    x, w = t.array(np.ones(3)), t.parameter(np.full(3, 2.0))
    y = (x * w).sum()
    assert not x.requires_grad
    assert y.requires_grad
    assert len(tape.gradients(y)) == 1
    np.testing.assert_array_equal(tape.gradients(y, [x])[0].numpy(), np.full(3, 2.0))  # asked for by name, it is given
    assert len(tape.gradients((x * w.detach()).sum() + w.sum())) == 1
    np.testing.assert_array_equal(tape.gradients((x * w.detach()).sum() + w.sum())[0].numpy(), np.ones(3))


def test_a_leaf_that_does_not_matter_has_zero_gradient() -> None:
    t = Tape()
    x, w = t.parameter(np.ones(3)), t.parameter(np.ones(2))
    np.testing.assert_array_equal(tape.gradients(x.sum(), [w])[0].numpy(), np.zeros(2))


def test_what_cannot_be_is_refused_with_numbers() -> None:
    t, other = Tape(), Tape()
    x = t.parameter(np.ones((2, 3)))
    with pytest.raises(BadInput, match=r"\(2, 3\).*seed"):
        tape.gradients(x)
    with pytest.raises(BadInput, match="broadcast"):
        x + np.ones(4)
    with pytest.raises(BadInput, match="inner axes"):
        x @ x
    with pytest.raises(BadInput, match="another tape"):
        x + other.array(np.ones(3))
    with pytest.raises(BadInput, match="reshape"):
        x.reshape(4, 2)
    with pytest.raises(Unsupported, match="truth"):
        bool(x)
    with pytest.raises(BadInput, match=r"outside \[0, 2\)"):
        gather.take_rows(x, t.array([0, 2])).numpy()
    with pytest.raises(BadInput, match="one type"):
        x + t.array(np.ones(3, dtype=np.int64))
    with pytest.raises(BadInput, match="cannot be put on a tape"):
        t.array("banana")


def test_float32_stays_float32_and_numbers_agree() -> None:
    t = Tape(np.float32)
    x = t.parameter(np.linspace(-1, 1, 6).reshape(2, 3))
    y = (activations.sigmoid(x * 2.0 + 1.0) @ x.T).sum()
    (g,) = tape.gradients(y)
    assert g.numpy().dtype == y.numpy().dtype == np.float32


def test_numpy_arrays_on_either_side() -> None:
    t = Tape(np.float32)
    x = t.parameter(np.ones((2, 2)))
    ones = np.ones((2, 2))
    for y, expected in ((ones + x, 2.0), (3.0 - x, 2.0), (ones * x, 1.0), (ones @ x, 2.0), (x * np.float64(2.0), 2.0), (4 / (x + x), 2.0)):
        assert isinstance(y, Array)
        assert y.numpy().dtype == np.float32
        np.testing.assert_array_equal(y.numpy(), np.full((2, 2), expected))
    assert [row.shape for row in x] == [(2,), (2,)]
    with pytest.raises(BadInput, match="index 2 is outside axis 0"):
        x[2]


def test_results_are_the_callers_own() -> None:
    t = Tape()
    x = t.array(np.arange(3.0))
    y, same, spread = tape.evaluate([x * 2.0, x, (x * 2.0).reshape(3, 1) + np.zeros((3, 2))])
    same[...] = 7.0
    y[...] = 7.0
    assert x.data[0] == 0.0
    np.testing.assert_array_equal(spread[:, 1], [0.0, 2.0, 4.0])


def test_empty_arrays_pass_through() -> None:
    t = Tape()
    x, w = t.parameter(np.zeros((0, 3))), t.parameter(np.ones((3, 2)))
    loss = activations.tanh(x @ w).sum()
    gx, gw = tape.gradients(loss)
    assert gx.numpy().shape == (0, 3)
    np.testing.assert_array_equal(gw.numpy(), np.zeros((3, 2)))


def test_big_exponents_do_not_overflow() -> None:
    t = Tape()
    x = t.parameter(np.array([[-1e3, 0.0, 1e3]]))
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_allclose(activations.sigmoid(x).numpy(), [[0.0, 0.5, 1.0]])
        np.testing.assert_allclose(activations.softmax(x).numpy(), [[0.0, 0.0, 1.0]])
        assert np.isfinite(activations.log_softmax(x).numpy()).all()
