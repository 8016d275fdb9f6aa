"""Reverse-mode differentiation by extending the graph (SOURCES A1): adjoints are nodes of the same tape.

    forward   v1 ─> v3 ─┐
              v2 ─> v4 ─┴> v6 ─> y            for node in reverse order:
    adjoints  v1' <─ v3' <─┐                      adjoint = sum of the partial adjoints of its readers
              v2' <─ v4' <─┴─ v6' <─ 1            hand it to the node's vjp, which records more nodes

So planning sees forward and backward together, and a gradient can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from memfit.core.errors import BadInput, Unsupported
from memfit.tape.array import Array, Node, Tape
from memfit.tape.ops.broadcast import reshape, sum_over
from memfit.tape.ops.elementwise import add, lift, multiply
from memfit.tape.ops.fill import ones_like, zeros_like
from memfit.tape.ops.views import get_item, stack


def gradients(y: Array, wrt: Sequence[Array] | None = None, *, seed: Array | None = None, zero_buffers: bool = False) -> tuple[Array, ...]:
    """Adjoints of `wrt` (by default every leaf that requires a gradient), recorded after what is there already.

    `seed` is y's own adjoint (ones for a scalar). With `zero_buffers` every adjoint starts as an explicit buffer of zeros
    that partial adjoints are added to, as in autograds that give each node a `grad` array: for comparisons.
    """
    if seed is None and y.size != 1:
        raise BadInput(f"gradients of an array of shape {y.shape}: give a seed of that shape, or sum it to a scalar first.")
    if wrt is None:
        wrt = _leaves(y)
    with _backward(y.tape):
        start = ones_like(y) if seed is None else seed
        return _adjoints([(y, start)], wrt, zero_buffers=zero_buffers)


def _leaves(y: Array) -> list[Array]:
    """Leaves that y depends on and that require a gradient, in the order of their values."""
    seen: set[int] = set()
    found: dict[int, Array] = {}
    waiting = [y]
    while waiting:
        array = waiting.pop()
        if array.id in seen:
            continue
        seen.add(array.id)
        if array.node >= 0:
            waiting.extend(array.tape.nodes[array.node].inputs)
        elif array.requires_grad:
            found[array.value] = array
    return [found[v] for v in sorted(found)]


@contextmanager
def _backward(tape: Tape) -> Iterator[None]:
    before, tape.recording_backward = tape.recording_backward, True
    try:
        yield
    finally:
        tape.recording_backward = before


def _adjoints(
    seeds: Sequence[tuple[Array, Array]], wrt: Sequence[Array], *, since: int = 0, zero_buffers: bool = False
) -> tuple[Array, ...]:
    """Walk back over the nodes from `since` on."""
    tape = seeds[0][0].tape
    depends = _dependents(tape, wrt, since)
    adjoint: dict[int, Array] = {}

    def receive(array: Array, part: Array) -> None:
        if part.shape != array.shape:
            raise BadInput(f"an adjoint of shape {part.shape} was given for an array of shape {array.shape}.")
        if zero_buffers and array.id not in adjoint:
            part = add(zeros_like(array), part)
        adjoint[array.id] = add(adjoint[array.id], part) if array.id in adjoint else part

    for array, part in seeds:
        receive(array, part)
    last = max((array.node for array, _ in seeds), default=-1)
    for node in reversed(tape.nodes[since : last + 1]):
        if not any(out.id in adjoint and out.id in depends for out in node.outputs):
            continue
        if node.vjp is None:
            raise Unsupported(f"{node.name} has no gradient, but the result depends on it; detach() its input or do not ask for it.")
        parts = node.vjp(node, [adjoint.get(out.id) for out in node.outputs])
        for source, given in zip(node.inputs, parts, strict=True):
            if given is not None and source.id in depends:
                receive(source, given)
    return tuple(adjoint[w.id] if w.id in adjoint else zeros_like(w) for w in wrt)


def _dependents(tape: Tape, wrt: Sequence[Array], since: int) -> set[int]:
    """Ids of every array that depends on one of `wrt`."""
    found = {w.id for w in wrt}
    first = min((w.node for w in wrt), default=-1)
    for node in tape.nodes[max(first, since) :]:
        if any(x.id in found for x in node.inputs):
            found.update(out.id for out in node.outputs if out.dtype.kind == "f")
    return found


def vjp_through(simple: Callable[..., Sequence[Array]], node: Node, u: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """A vjp for an op without one: write the op once more in simple ops, and differentiate those."""
    since = len(node.inputs[0].tape.nodes)
    outputs = simple(*node.inputs)
    seeds = [(out, part) for out, part in zip(outputs, u, strict=True) if part is not None]
    distinct = list({x.id: x for x in node.inputs}.values())
    found = dict(zip((x.id for x in distinct), _adjoints(seeds, distinct, since=since), strict=True))
    return tuple(found.pop(x.id, None) for x in node.inputs)  # an input given twice gets its adjoint once


def hessian_vector(y: Array, x: Array, vector: Array) -> Array:
    """H v without H: the gradient of ⟨∂y/∂x, v⟩."""
    (g,) = gradients(y, [x])
    return gradients(sum_over(multiply(g, lift(g, vector))), [x])[0]


def hessian(y: Array, x: Array) -> Array:
    """All second derivatives of a scalar, shape x.shape + x.shape: one backward pass per entry of x."""
    (g,) = gradients(y, [x])
    flat = reshape(g, (-1,))
    rows = [reshape(gradients(get_item(flat, k), [x])[0], (-1,)) for k in range(x.size)]
    return reshape(stack(rows), (*x.shape, *x.shape))
