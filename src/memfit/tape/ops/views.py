"""Parts of arrays: transpose, slice, split, join. Views take no bytes and are no ops; only their gradients may be.

narrow        <->  embed: zeros with the slice filled in
split          ->  the pieces' adjoints, concatenated (one op, not one padded array per piece)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from memfit.core.errors import BadInput, Unsupported
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Spec, normal_axis
from memfit.tape.ops.broadcast import reshape
from memfit.tape.ops.fill import zeros_like


def transpose(x: Array, axes: Sequence[int] | None = None) -> Array:
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(normal_axis(a, x.ndim) for a in axes)
    inverse = tuple(order.index(k) for k in range(x.ndim))
    return x.tape.look("transpose", x, [x.view.transpose(order)], lambda _, u: [transpose(get_only(u), inverse)])[0]


def swap_axes(x: Array, a: int, b: int) -> Array:
    axes = list(range(x.ndim))
    a, b = normal_axis(a, x.ndim), normal_axis(b, x.ndim)
    axes[a], axes[b] = axes[b], axes[a]
    return transpose(x, axes)


def narrow(x: Array, axis: int, start: int, stop: int) -> Array:
    """The half-open range [start, stop) of one axis."""
    axis = normal_axis(axis, x.ndim)
    length = x.shape[axis]
    return x.tape.look("narrow", x, [x.view.narrow(axis, start, stop)], lambda _, u: [embed(get_only(u), axis, start, length)])[0]


def embed(x: Array, axis: int, start: int, length: int) -> Array:
    """Zeros of `length` along one axis, with x at `start`: the adjoint of `narrow`."""
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    stop = start + x.shape[axis]
    inside = (slice(None),) * axis + (slice(start, stop),)

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        outputs[0][...] = 0
        np.copyto(outputs[0][inside], inputs[0])

    return x.tape.apply("embed", [x], [Spec(shape, x.dtype)], kernel, vjp=lambda _, u: [narrow(get_only(u), axis, start, stop)], flops=0)[0]


def split(x: Array, sections: int, axis: int = -1) -> tuple[Array, ...]:
    axis = normal_axis(axis, x.ndim)
    if sections < 1 or x.shape[axis] % sections:
        raise BadInput(f"axis {axis} of shape {x.shape} cannot be split into {sections} equal parts.")
    width = x.shape[axis] // sections
    views = [x.view.narrow(axis, k * width, (k + 1) * width) for k in range(sections)]

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [concatenate([zeros_like(piece) if g is None else g for piece, g in zip(node.outputs, u, strict=True)], axis)]

    return x.tape.look("split", x, views, vjp)


def concatenate(parts: Sequence[Array], axis: int = 0) -> Array:
    if not parts:
        raise BadInput("concatenate needs at least one array.")
    axis = normal_axis(axis, parts[0].ndim)
    if len({(p.shape[:axis], p.shape[axis + 1 :], p.dtype) for p in parts}) > 1:
        raise BadInput(f"concatenate along axis {axis}: shapes {[p.shape for p in parts]} differ elsewhere, or types differ.")
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part.shape[axis])
    shape = (*parts[0].shape[:axis], bounds[-1], *parts[0].shape[axis + 1 :])

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], _: Sequence[Data]) -> None:
        np.concatenate(inputs, axis=axis, out=outputs[0])

    def vjp(_: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [narrow(get_only(u), axis, start, stop) for start, stop in pairwise(bounds)]

    return parts[0].tape.apply("concatenate", list(parts), [Spec(shape, parts[0].dtype)], kernel, vjp=vjp, flops=0)[0]


def stack(parts: Sequence[Array], axis: int = 0) -> Array:
    axis = normal_axis(axis, parts[0].ndim + 1) if parts else 0
    return concatenate([reshape(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in parts], axis)


def get_item(x: Array, key: Any) -> Array:
    """Basic indexing: integers, slices of step 1 and one ellipsis."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if keys.count(Ellipsis) > 1 or len(keys) - keys.count(Ellipsis) > x.ndim:
        raise BadInput(f"index {key!r} has too many entries for shape {x.shape}.")
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.ndim - len(keys) + 1)
    dropped = []
    for axis, entry in enumerate(keys):
        if isinstance(entry, (int, np.integer)):
            if not -x.shape[axis] <= entry < x.shape[axis]:
                raise BadInput(f"index {entry} is outside axis {axis} of shape {x.shape}.")
            start = int(entry) % x.shape[axis]
            x = narrow(x, axis, start, start + 1)
            dropped.append(axis)
        elif isinstance(entry, slice) and entry.step in (None, 1):
            start, stop, _ = entry.indices(x.shape[axis])
            if (start, stop) != (0, x.shape[axis]):
                x = narrow(x, axis, start, max(start, stop))
        else:
            raise Unsupported(f"index {entry!r} is not an integer or a slice of step 1; use take_rows() to gather by an index array.")
    return reshape(x, tuple(n for axis, n in enumerate(x.shape) if axis not in dropped)) if dropped else x
