"""Networks to plan: deep MLPs, residual ones, a small CNN, an LSTM, a transformer block. Each records a loss on a tape.

Weights are drawn from a seed; sizes are the caller's. All of them return the loss and the arrays to feed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Tape
from memfit.tape.array_view import Data
from memfit.tape.ops.activations import gelu, relu, sigmoid, tanh
from memfit.tape.ops.attention import standard_attention
from memfit.tape.ops.broadcast import reshape
from memfit.tape.ops.conv import conv2d
from memfit.tape.ops.elementwise import add, multiply, power, subtract
from memfit.tape.ops.flash import flash_attention
from memfit.tape.ops.gather import cross_entropy, take_rows
from memfit.tape.ops.linear import linear, matmul
from memfit.tape.ops.norm import batch_norm, layer_norm
from memfit.tape.ops.pool2d import max_pool2d
from memfit.tape.ops.reduce import mean_over
from memfit.tape.ops.views import split, transpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A recorded forward pass: `output` before the loss, `loss`, the parameters, and what to feed."""

    tape: Tape
    output: Array
    loss: Array
    parameters: tuple[Array, ...]
    inputs: tuple[Array, ...]
    targets: tuple[Array, ...]


class _Init:
    """Weights from a seed, on a tape."""

    def __init__(self, tape: Tape, seed: int) -> None:
        self.tape, self.random = tape, np.random.default_rng(seed)
        self.parameters: list[Array] = []

    def weight(self, *shape: int, fan_in: int, name: str = "weight") -> Array:
        return self._parameter(self.random.standard_normal(shape) / sqrt(fan_in), name)

    def zeros(self, *shape: int, name: str = "bias") -> Array:
        return self._parameter(np.zeros(shape), name)

    def ones(self, *shape: int, name: str = "gamma") -> Array:
        return self._parameter(np.ones(shape), name)

    def _parameter(self, data: Data, name: str) -> Array:
        self.parameters.append(self.tape.parameter(data, name))
        return self.parameters[-1]

    def net(self, output: Array, loss: Array, inputs: tuple[Array, ...], target: Array) -> Net:
        return Net(tape=self.tape, output=output, loss=loss, parameters=tuple(self.parameters), inputs=inputs, targets=(target,))

    def normal(self, *shape: int, name: str) -> Array:
        return self.tape.array(self.random.standard_normal(shape), name=name)

    def labels(self, num: int, classes: int) -> Array:
        return self.tape.array(self.random.integers(0, classes, num), name="labels")


def mlp(
    *,
    depth: int,
    width: int,
    batch: int,
    features: int | None = None,
    classes: int = 0,
    residual: bool = False,
    dtype: Any = np.float64,
    seed: int = 0,
) -> Net:
    """`depth` layers of linear + tanh (with a skip connection where widths agree, if residual).

    With `classes` a linear head and cross-entropy follow, without it the squared error.
    """
    _positive(depth=depth, width=width, batch=batch, features=width if features is None else features)
    tape = Tape(dtype)
    init = _Init(tape, seed)
    x = h = init.normal(batch, features or width, name="x")
    for layer in range(depth):
        with tape.scope(f"layers.{layer}"):
            weight, bias = init.weight(h.shape[1], width, fan_in=h.shape[1]), init.zeros(width)
            y = tanh(linear(h, weight, bias))
            h = add(h, y) if residual and h.shape == y.shape else y
    if classes:
        with tape.scope("head"):
            h = linear(h, init.weight(width, classes, fan_in=width), init.zeros(classes))
        target = init.labels(batch, classes)
        loss = cross_entropy(h, target)
    else:
        target = init.normal(batch, width, name="target")
        loss = mean_over(power(subtract(h, target), 2))
    return init.net(h, loss, (x,), target)


def lstm(*, steps: int, width: int, batch: int, dtype: Any = np.float64, seed: int = 0) -> Net:
    """An LSTM unrolled over `steps` inputs; the loss looks at the last state."""
    _positive(steps=steps, width=width, batch=batch)
    tape = Tape(dtype)
    init = _Init(tape, seed)
    w_x, w_h = init.weight(width, 4 * width, fan_in=width), init.weight(width, 4 * width, fan_in=width)
    bias = init.zeros(4 * width)
    inputs = tuple(init.normal(batch, width, name=f"x{t}") for t in range(steps))
    h, c = tape.array(np.zeros((batch, width)), name="h0"), tape.array(np.zeros((batch, width)), name="c0")
    for t, x in enumerate(inputs):
        with tape.scope(f"time.{t}"):
            h, c = lstm_cell(x, h, c, w_x, w_h, bias)
    target = init.normal(batch, width, name="target")
    return init.net(h, mean_over(power(subtract(h, target), 2)), inputs, target)


def lstm_cell(x: Array, h: Array, c: Array, w_x: Array, w_h: Array, bias: Array) -> tuple[Array, Array]:
    """One step: gates i, f, g, o in one product each for x and h (torch's order)."""
    gates = add(add(matmul(x, w_x), matmul(h, w_h)), bias)
    i, f, g, o = split(gates, 4)
    c = add(multiply(sigmoid(f), c), multiply(sigmoid(i), tanh(g)))
    return multiply(sigmoid(o), tanh(c)), c


def cnn(*, blocks: int, channels: int, image: int, batch: int, classes: int = 10, dtype: Any = np.float64, seed: int = 0) -> Net:
    """A small ResNet: conv-BN-relu, max pool, then residual blocks, average pool, linear."""
    _positive(blocks=blocks, channels=channels, image=image, batch=batch, classes=classes)
    tape = Tape(dtype)
    init = _Init(tape, seed)
    x = init.normal(batch, 3, image, image, name="x")
    h = max_pool2d(relu(_conv_bn(init, x, 3, channels)), 2)
    for block in range(blocks):
        with tape.scope(f"blocks.{block}"):
            y = relu(_conv_bn(init, h, channels, channels))
            h = relu(add(h, _conv_bn(init, y, channels, channels)))
    pooled = mean_over(h, (2, 3))
    logits = linear(pooled, init.weight(channels, classes, fan_in=channels), init.zeros(classes))
    labels = init.labels(batch, classes)
    return init.net(logits, cross_entropy(logits, labels), (x,), labels)


def _conv_bn(init: _Init, x: Array, c_in: int, c_out: int) -> Array:
    weight = init.weight(c_out, c_in, 3, 3, fan_in=9 * c_in)
    return batch_norm(conv2d(x, weight, padding=1), init.ones(c_out), init.zeros(c_out, name="beta"))[0]


def transformer(
    *,
    layers: int,
    width: int,
    heads: int,
    length: int,
    batch: int,
    vocabulary: int,
    flash: bool = False,
    dtype: Any = np.float64,
    seed: int = 0,
) -> Net:
    """Pre-norm transformer layers on embedded tokens, predicting a class per token."""
    _positive(layers=layers, width=width, heads=heads, length=length, batch=batch, vocabulary=vocabulary)
    if width % heads:
        raise BadInput(f"a transformer of width {width} cannot have {heads} heads: the width must be a multiple.")
    tape = Tape(dtype)
    init = _Init(tape, seed)
    tokens = init.labels(batch * length, vocabulary)
    h = reshape(take_rows(init.weight(vocabulary, width, fan_in=1, name="embedding"), tokens), (batch, length, width))
    for layer in range(layers):
        with tape.scope(f"layers.{layer}"):
            h = add(h, _self_attention(init, _norm(init, h), heads, flash))
            inner = gelu(linear(_norm(init, h), init.weight(width, 4 * width, fan_in=width), init.zeros(4 * width)))
            h = add(h, linear(inner, init.weight(4 * width, width, fan_in=4 * width), init.zeros(width)))
    logits = linear(reshape(_norm(init, h), (batch * length, width)), init.weight(width, vocabulary, fan_in=width))
    labels = init.labels(batch * length, vocabulary)
    return init.net(logits, cross_entropy(logits, labels), (tokens,), labels)


def _norm(init: _Init, x: Array) -> Array:
    return layer_norm(x, init.ones(x.shape[-1]), init.zeros(x.shape[-1]))


def _self_attention(init: _Init, x: Array, heads: int, flash: bool) -> Array:
    batch, length, width = x.shape
    qkv = linear(x, init.weight(width, 3 * width, fan_in=width))
    q, k, v = (
        reshape(transpose(reshape(part, (batch, length, heads, -1)), (0, 2, 1, 3)), (batch * heads, length, -1)) for part in split(qkv, 3)
    )
    q = multiply(q, 1 / sqrt(width // heads))
    mixed = flash_attention(q, k, v) if flash else standard_attention(q, k, v)
    joined = reshape(transpose(reshape(mixed, (batch, heads, length, -1)), (0, 2, 1, 3)), (batch, length, width))
    return linear(joined, init.weight(width, width, fan_in=width))


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise BadInput(f"{name} is {size}: at least 1 is needed.")
