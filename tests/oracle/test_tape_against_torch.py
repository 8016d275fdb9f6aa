"""The tape's layers against torch's, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402, N812

from memfit import tape  # noqa: E402
from memfit.tape.array import Tape  # noqa: E402
from memfit.tape.examples import nets  # noqa: E402
from memfit.tape.ops import activations, conv, flash, gather, norm, pool2d  # noqa: E402
from memfit.tape.ops.views import concatenate, stack  # noqa: E402

LABELS = [1, 0, 4, 2]
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "conv": (
        lambda x, w: conv.conv2d(x, w, stride=2, padding=1),
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        [(3, 4, 9, 8), (5, 4, 3, 3)],
    ),
    "conv_wide": (lambda x, w: conv.conv2d(x, w, padding=2), lambda x, w: F.conv2d(x, w, padding=2), [(2, 3, 6, 7), (4, 3, 5, 5)]),
    "max_pool": (lambda x: pool2d.max_pool2d(x, 3, 2), lambda x: F.max_pool2d(x, 3, 2), [(2, 3, 9, 8)]),
    "avg_pool": (lambda x: pool2d.avg_pool2d(x, 3, 2), lambda x: F.avg_pool2d(x, 3, 2), [(2, 3, 9, 8)]),
    "batch_norm": (
        lambda x, g, b: norm.batch_norm(x, g, b)[0],
        lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True),
        [(4, 3, 5, 6), (3,), (3,)],
    ),
    "layer_norm": (norm.layer_norm, lambda x, g, b: F.layer_norm(x, (7,), g, b), [(4, 3, 7), (7,), (7,)]),
    "softmax": (activations.softmax, lambda x: F.softmax(x, -1), [(3, 4, 5)]),
    "gelu": (activations.gelu, lambda x: F.gelu(x, approximate="tanh"), [(3, 5)]),
    "attention": (
        lambda q, k, v: flash.flash_attention(q, k, v, block_rows=8, block_columns=5),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0),
        [(2, 19, 8), (2, 23, 8), (2, 23, 8)],
    ),
    "cross_entropy": (
        lambda x: gather.cross_entropy(x, x.tape.array(LABELS)),
        lambda x: F.cross_entropy(x, torch.tensor(LABELS)),
        [(4, 6)],
    ),
    "embedding": (lambda e: gather.take_rows(e, e.tape.array(LABELS)), lambda e: F.embedding(torch.tensor(LABELS), e), [(6, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_torch(name: str) -> None:
    ours, theirs, shapes = CASES[name]
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(s) for s in shapes]
    t = Tape()
    leaves = [t.parameter(d) for d in data]
    out = ours(*leaves)
    seed = rng.standard_normal(out.shape)
    computed = tape.evaluate([out, *tape.gradients(out, leaves, seed=t.array(seed))])
    parameters = [torch.tensor(d, requires_grad=True) for d in data]
    expected = theirs(*parameters)
    expected.backward(torch.tensor(seed))
    np.testing.assert_allclose(computed[0], expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    for g, p in zip(computed[1:], parameters, strict=True):
        np.testing.assert_allclose(g, p.grad.numpy(), rtol=1e-9, atol=1e-11)


def test_lstm_equals_torch() -> None:
    steps, batch, width = 6, 3, 5
    rng = np.random.default_rng(0)
    reference = torch.nn.LSTM(width, width, dtype=torch.float64)
    x = rng.standard_normal((steps, batch, width))
    t = Tape()
    w_x, w_h = (t.parameter(p.detach().numpy().T) for p in (reference.weight_ih_l0, reference.weight_hh_l0))
    bias = t.parameter((reference.bias_ih_l0 + reference.bias_hh_l0).detach().numpy())
    h = c = t.array(np.zeros((batch, width)))
    states = []
    for step in range(steps):
        h, c = nets.lstm_cell(t.array(x[step]), h, c, w_x, w_h, bias)
        states.append(h)
    out = stack(states)
    computed = tape.evaluate([out, *tape.gradients((out * out).sum(), [w_x, w_h, bias])])
    expected, _ = reference(torch.tensor(x))
    (expected * expected).sum().backward()
    np.testing.assert_allclose(computed[0], expected.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(computed[1].T, reference.weight_ih_l0.grad.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(computed[2].T, reference.weight_hh_l0.grad.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(computed[3], reference.bias_ih_l0.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_hessian_equals_torch() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 3)), rng.standard_normal((3, 2))

    def loss(weight: Any) -> Any:
        return F.cross_entropy(torch.tanh(torch.tensor(x) @ weight), torch.tensor([0, 1, 1, 0]))

    expected = torch.autograd.functional.hessian(loss, torch.tensor(w)).numpy()
    t = Tape()
    weight = t.parameter(w)
    y = gather.cross_entropy(activations.tanh(t.array(x) @ weight), t.array([0, 1, 1, 0]))
    np.testing.assert_allclose(tape.hessian(y, weight).numpy(), expected, rtol=1e-9, atol=1e-12)


def test_gradient_through_concatenation_of_views_equals_torch() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 6))
    t = Tape()
    x = t.parameter(a)
    y = concatenate([x[:, 2:5].T, x[1:, :4].reshape(4, 3)[:, ::1].T[:, :4]], 0)
    (g,) = tape.gradients((y * y * y).sum())
    p = torch.tensor(a, requires_grad=True)
    z = torch.cat([p[:, 2:5].T, p[1:, :4].reshape(4, 3).T[:, :4]], 0)
    (z**3).sum().backward()
    np.testing.assert_allclose(g.numpy(), p.grad.numpy(), rtol=1e-12)
