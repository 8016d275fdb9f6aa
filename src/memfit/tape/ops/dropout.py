"""Dropout that keeps no mask: the seed is an input, and the gradient draws the same numbers again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array import Array, Node, get_only
from memfit.tape.array_view import Data, Spec


def dropout(x: Array, drop_fraction: float, seed: Array) -> Array:
    """Zero a fraction of x at random and scale the rest. `seed` is an int64 array of one entry: change it every step.

    The mask is a function of the seed alone, so a recomputation gives the same values: the op is replayable.
    """
    if not 0 <= drop_fraction < 1:
        raise BadInput(f"dropout of {drop_fraction}: a fraction in [0, 1) is expected.")
    if seed.dtype != np.int64 or seed.size != 1:
        raise BadInput(f"dropout's seed has shape {seed.shape} and type {seed.dtype}: one int64 is expected.")

    def kernel(inputs: Sequence[Data], outputs: Sequence[Data], scratch: Sequence[Data]) -> None:
        uniform, dropped = scratch
        np.random.Generator(np.random.Philox(int(inputs[1].reshape(-1)[0]))).random(out=uniform, dtype=x.dtype.type)
        np.less(uniform, drop_fraction, out=dropped)
        np.multiply(inputs[0], 1.0 / (1.0 - drop_fraction), out=outputs[0])
        np.copyto(outputs[0], 0, where=dropped)

    def vjp(node: Node, u: Sequence[Array | None]) -> list[Array | None]:
        return [dropout(get_only(u), drop_fraction, node.inputs[1]), None]

    scratch = [x.view.spec, Spec(x.shape, np.dtype(np.bool_))]
    return x.tape.apply("dropout", [x, seed], [x.view.spec], kernel, vjp=vjp, scratch=scratch, overwrites=(0,), flops=10 * x.size)[0]
