"""Pooling over windows of an NCHW image. Max pooling keeps a one-byte position per window, not its input.

max_pool2d ──> y, position      gradient: g is put where `position` says; its gradient gathers from there again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Shape, Spec

_POSITION = np.dtype(np.uint8)
_MASK = np.dtype(np.bool_)


def max_pool2d(x: Array, size: int, stride: int | None = None) -> Array:
    stride = size if stride is None else stride
    out = _out_shape("max_pool2d", x.shape, size, stride)
    if size * size > 256:
        raise BadInput(f"max_pool2d with a window of {size}: positions are kept in one byte, so 16 is the largest.")

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (y, position), (mask,) = outputs, scratch
        position[...] = 0
        for k, part in enumerate(_parts(inputs[0], out, size, stride)):
            if k == 0:
                np.copyto(y, part)
                continue
            np.greater(part, y, out=mask)
            np.copyto(y, part, where=mask)
            np.copyto(position, k, where=mask, casting="unsafe")

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        return [_scatter(get_only(u), node.outputs[1], x.shape, size, stride)]

    specs = [Spec(out, x.dtype), Spec(out, _POSITION)]
    return x.tape.apply("max_pool2d", [x], specs, kernel, vjp=vjp, scratch=[Spec(out, _MASK)], flops=size * size * specs[0].size)[0]


def _scatter(g: Array, position: Array, image: Shape, size: int, stride: int) -> Array:
    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (g, position), (mask, part_g) = inputs, scratch
        outputs[0][...] = 0
        for k, part in enumerate(_parts(outputs[0], g.shape, size, stride)):
            np.equal(position, np.uint8(k), out=mask)
            part_g[...] = 0
            np.copyto(part_g, g, where=mask)
            np.add(part, part_g, out=part)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [_gather(get_only(u), node.inputs[1], size, stride), None]

    scratch = [Spec(g.shape, _MASK), g.view.spec]
    return g.tape.apply("max_pool2d_grad", [g, position], [Spec(image, g.dtype)], kernel, vjp=vjp, scratch=scratch)[0]


def _gather(x: Array, position: Array, size: int, stride: int) -> Array:
    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (x, position), (y,), (mask,) = inputs, outputs, scratch
        for k, part in enumerate(_parts(x, y.shape, size, stride)):
            np.equal(position, np.uint8(k), out=mask)
            np.copyto(y, part, where=mask)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [_scatter(get_only(u), node.inputs[1], x.shape, size, stride), None]

    return x.tape.apply(
        "max_pool2d_gather", [x, position], [Spec(position.shape, x.dtype)], kernel, vjp=vjp, scratch=[Spec(position.shape, _MASK)]
    )[0]  # fmt: skip


def avg_pool2d(x: Array, size: int, stride: int | None = None) -> Array:
    stride = size if stride is None else stride
    out = _out_shape("avg_pool2d", x.shape, size, stride)

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        outputs[0][...] = 0
        for part in _parts(inputs[0], out, size, stride):
            np.add(outputs[0], part, out=outputs[0])
        np.multiply(outputs[0], 1.0 / (size * size), out=outputs[0])

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        return [_spread_gradient(get_only(u), node.inputs[0].shape, size, stride)]

    return x.tape.apply("avg_pool2d", [x], [Spec(out, x.dtype)], kernel, vjp=vjp, flops=x.size)[0]


def _spread_gradient(g: Array, image: Shape, size: int, stride: int) -> Array:
    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        outputs[0][...] = 0
        for part in _parts(outputs[0], inputs[0].shape, size, stride):
            np.add(part, inputs[0], out=part)
        np.multiply(outputs[0], 1.0 / (size * size), out=outputs[0])

    def vjp(_: Node, u: Sequence[Array | None]) -> list[Array]:
        return [avg_pool2d(get_only(u), size, stride)]

    return g.tape.apply("avg_pool2d_grad", [g], [Spec(image, g.dtype)], kernel, vjp=vjp)[0]


def _parts(image: Data, out: Shape, size: int, stride: int) -> Iterator[Data]:
    """For every position inside a window, the pixels that all windows have there."""
    oh, ow = out[2:]
    for i in range(size):
        for j in range(size):
            yield image[:, :, i : i + stride * (oh - 1) + 1 : stride, j : j + stride * (ow - 1) + 1 : stride]


def _out_shape(name: str, image: Shape, size: int, stride: int) -> Shape:
    if len(image) != 4 or not 1 <= size <= min(image[2:]) or stride < 1:
        raise BadInput(f"{name} of shape {image} with window {size} and stride {stride}: NCHW and a window inside the image are expected.")
    return image[0], image[1], (image[2] - size) // stride + 1, (image[3] - size) // stride + 1
