"""Two-dimensional convolution as a matrix product of unrolled windows, one image at a time.

    image (C, H, W) ─ unroll ─> columns (C·kh·kw, oh·ow)        out = weight (K, C·kh·kw) @ columns

Unrolling one image keeps the workspace independent of the batch. Convolution is bilinear, and its two gradients and it are
each other's gradients, so second derivatives need no further op. Layout: images NCHW, weights KCHW.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Shape, Spec
from memfit.tape.ops.broadcast import copy_if_strided


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry that a convolution and its gradients share."""

    image: Shape  # N, C, H, W
    weight: Shape  # K, C, kh, kw
    stride: int
    padding: int

    @property
    def grid(self) -> tuple[int, int]:
        (_, _, height, width), (_, _, kh, kw) = self.image, self.weight
        return (height + 2 * self.padding - kh) // self.stride + 1, (width + 2 * self.padding - kw) // self.stride + 1

    @property
    def out(self) -> Shape:
        return self.image[0], self.weight[0], *self.grid

    @property
    def padded(self) -> Shape:
        return self.image[1], self.image[2] + 2 * self.padding, self.image[3] + 2 * self.padding

    @property
    def columns(self) -> Shape:
        return (*self.weight[1:], *self.grid)

    @property
    def flops(self) -> int:
        n, k, oh, ow = self.out
        return 2 * n * k * oh * ow * self.weight[1] * self.weight[2] * self.weight[3]


def conv2d(x: Array, weight: Array, *, stride: int = 1, padding: int = 0) -> Array:
    w = _window(x.shape, weight.shape, stride, padding)
    return _forward(copy_if_strided(x), copy_if_strided(weight), w)


def _window(image: Shape, weight: Shape, stride: int, padding: int) -> Window:
    if len(image) != 4 or len(weight) != 4 or image[1] != weight[1]:
        raise BadInput(f"conv2d of images {image} with weights {weight}: NCHW and KCHW with equal C are expected.")
    if stride < 1 or padding < 0:
        raise BadInput(f"conv2d with stride {stride} and padding {padding}: at least 1 and 0 are expected.")
    w = Window(image, weight, stride, padding)
    if min(w.grid) < 1:
        raise BadInput(f"conv2d: the {weight[2:]} window does not fit into the {image[2:]} image with padding {padding}.")
    return w


def _forward(x: Array, weight: Array, w: Window) -> Array:
    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (x, weight), (padded, columns) = inputs, scratch
        matrix, flat = weight.reshape(w.weight[0], -1), columns.reshape(-1, w.grid[0] * w.grid[1])
        padded[...] = 0
        for image, out in zip(x, outputs[0], strict=True):
            _unroll(image, padded, columns, w)
            np.matmul(matrix, flat, out=out.reshape(w.weight[0], -1))

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        g = copy_if_strided(get_only(u))
        return [_grad_image(g, node.inputs[1], w), _grad_weight(node.inputs[0], g, w)]

    scratch = [Spec(w.padded, x.dtype), Spec(w.columns, x.dtype)]
    return x.tape.apply("conv2d", [x, weight], [Spec(w.out, x.dtype)], kernel, vjp=vjp, scratch=scratch, flops=w.flops)[0]


def _grad_image(g: Array, weight: Array, w: Window) -> Array:
    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (g, weight), (padded, columns) = inputs, scratch
        matrix, flat = weight.reshape(w.weight[0], -1), columns.reshape(-1, w.grid[0] * w.grid[1])
        for grad, out in zip(g, outputs[0], strict=True):
            np.matmul(matrix.T, grad.reshape(w.weight[0], -1), out=flat)
            _roll(columns, padded, out, w)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        v = copy_if_strided(get_only(u))
        return [_forward(v, node.inputs[1], w), _grad_weight(v, node.inputs[0], w)]

    scratch = [Spec(w.padded, g.dtype), Spec(w.columns, g.dtype)]
    return g.tape.apply("conv2d_grad_image", [g, weight], [Spec(w.image, g.dtype)], kernel, vjp=vjp, scratch=scratch, flops=w.flops)[0]


def _grad_weight(x: Array, g: Array, w: Window) -> Array:
    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        (x, g), (padded, columns, part) = inputs, scratch
        flat, total = columns.reshape(-1, w.grid[0] * w.grid[1]), outputs[0].reshape(w.weight[0], -1)
        padded[...] = 0
        total[...] = 0
        for image, grad in zip(x, g, strict=True):
            _unroll(image, padded, columns, w)
            np.matmul(grad.reshape(w.weight[0], -1), flat.T, out=part)
            np.add(total, part, out=total)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array]:
        v = copy_if_strided(get_only(u))
        return [_grad_image(node.inputs[1], v, w), _forward(node.inputs[0], v, w)]

    part = Spec((w.weight[0], w.weight[1] * w.weight[2] * w.weight[3]), x.dtype)
    scratch = [Spec(w.padded, x.dtype), Spec(w.columns, x.dtype), part]
    return x.tape.apply("conv2d_grad_weight", [x, g], [Spec(w.weight, x.dtype)], kernel, vjp=vjp, scratch=scratch, flops=w.flops)[0]


def _inside(padded: Data, w: Window) -> Data:
    return padded[:, w.padding : w.padding + w.image[2], w.padding : w.padding + w.image[3]]


def _unroll(image: Data, padded: Data, columns: Data, w: Window) -> None:
    """Copy every window of the image into the columns; the border of `padded` is already zero."""
    np.copyto(_inside(padded, w), image)
    c, y, x = padded.strides
    windows = as_strided(padded, w.columns, (c, y, x, y * w.stride, x * w.stride))
    np.copyto(columns, windows)


def _roll(columns: Data, padded: Data, image: Data, w: Window) -> None:
    """Add every column back to the pixels it came from."""
    (oh, ow), (kh, kw), s = w.grid, w.weight[2:], w.stride
    padded[...] = 0
    for i in range(kh):
        for j in range(kw):
            target = padded[:, i : i + s * (oh - 1) + 1 : s, j : j + s * (ow - 1) + 1 : s]
            np.add(target, columns[:, i, j], out=target)
    np.copyto(image, _inside(padded, w))
