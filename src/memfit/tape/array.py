"""Arrays on a tape: what the user writes; every operation is recorded, nothing runs.

    x ──┐
        ├─ matmul ── relu ── sum = loss          recorded as nodes of one tape
    w ──┘                                        gradients(loss, [w]) records *more nodes of the same tape*

A node either computes (it has a kernel and new values) or is a view (its output looks at its input's value). Values are
what takes bytes; `tape.program.compile_program` turns the nodes that a set of results needs into the core's Graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadInput, Unsupported
from memfit.core.graph import Kind
from memfit.tape.array_view import Data, Shape, Spec, View

Kernel = Callable[[Sequence[Data], Sequence[Data], Sequence[Data]], None]
"""`kernel(inputs, outputs, scratch)` fills the outputs. It allocates no array data: scratch is what it declared."""

Vjp = Callable[["Node", Sequence["Array | None"]], Sequence["Array | None"]]
"""From the adjoints of a node's outputs to those of its inputs, recorded as new nodes. None is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Bytes: an input, a parameter, or what a node computes. Leaves carry their data."""

    id: int
    spec: Spec
    kind: Kind
    name: str
    node: int = -1  # the node that computes it, or -1
    data: Data | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One recorded operation. `overwrites` lists the inputs whose bytes output 0 may take over, element for element."""

    id: int
    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    vjp: Vjp | None
    kernel: Kernel | None  # None: a view
    scratch: tuple[Spec, ...] = ()
    overwrites: tuple[int, ...] = ()
    flops: int = 0
    where: str = ""
    backward: bool = False


def get_only(adjoints: Sequence[Array | None]) -> Array:
    """The adjoint of a node with one output: a node is differentiated only when some output has one."""
    assert adjoints[0] is not None
    return adjoints[0]


class Tape:
    """The record. Order of recording is a topological order."""

    def __init__(self, dtype: Any = np.float64) -> None:
        self.dtype = np.dtype(dtype)
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.num_arrays = 0
        self.recording_backward = False
        self._where: list[str] = []

    def array(self, data: Any, *, requires_grad: bool = False, kind: Kind | None = None, name: str = "") -> Array:
        """A leaf: a parameter if it requires a gradient, an input otherwise. Floating data take the tape's type."""
        held = np.asarray(data)
        if held.dtype.kind == "O" or held.dtype.kind in "USc":
            raise BadInput(f"an array of type {held.dtype} cannot be put on a tape: give real or integer numbers.")
        if held.dtype.kind == "f" or requires_grad:
            held = held.astype(self.dtype, copy=False)
        held = np.array(held, order="C")  # ours: feeding and updating must not reach into the caller's arrays
        kind = kind or (Kind.PARAMETER if requires_grad else Kind.INPUT)
        value = self._value(Spec(held.shape, held.dtype), kind, name, data=held)
        return self._array(value, value.spec.view(), requires_grad)

    def parameter(self, data: Any, name: str = "") -> Array:
        return self.array(data, requires_grad=True, name=name)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names the module path of the nodes recorded inside."""
        self._where.append(name)
        try:
            yield
        finally:
            self._where.pop()

    def apply(
        self,
        name: str,
        inputs: Sequence[Array],
        outputs: Sequence[Spec],
        kernel: Kernel,
        *,
        vjp: Vjp | None,
        scratch: Sequence[Spec] = (),
        overwrites: Sequence[int] = (),
        flops: int | None = None,
    ) -> tuple[Array, ...]:
        """Record an operation that computes new values."""
        self._check_ours(name, inputs)
        kind = Kind.TEMPORARY if self.recording_backward else Kind.ACTIVATION
        node = len(self.nodes)
        needs = vjp is not None and any(x.requires_grad for x in inputs)
        made = tuple(
            self._array(self._value(s, kind, name, node=node), s.view(), needs and s.dtype.kind == "f", node, k)
            for k, s in enumerate(outputs)
        )
        self._record(
            name,
            tuple(inputs),
            made,
            vjp,
            kernel=kernel,
            scratch=tuple(scratch),
            overwrites=tuple(overwrites),
            flops=sum(s.size for s in outputs) if flops is None else flops,
        )
        return made

    def look(self, name: str, source: Array, views: Sequence[View], vjp: Vjp) -> tuple[Array, ...]:
        """Record views of an array: no bytes, no op, but gradients flow through."""
        node = len(self.nodes)
        value = self.values[source.value]
        made = tuple(self._array(value, view, source.requires_grad, node, k) for k, view in enumerate(views))
        self._record(name, (source,), made, vjp, kernel=None)
        return made

    def constant_view(self, source: Array) -> Array:
        """The same value as a leaf: gradients stop here."""
        return self._array(self.values[source.value], source.view, False)

    def _record(self, name: str, inputs: tuple[Array, ...], outputs: tuple[Array, ...], vjp: Vjp | None, **facts: Any) -> None:
        self.nodes.append(
            Node(
                id=len(self.nodes),
                name=name,
                inputs=inputs,
                outputs=outputs,
                vjp=vjp,
                where=".".join(self._where),
                backward=self.recording_backward,
                **facts,
            )
        )

    def _check_ours(self, name: str, inputs: Sequence[Array]) -> None:
        for x in inputs:
            if x.tape is not self:
                raise BadInput(f"{name}: an input belongs to another tape; record the whole step on one tape.")

    def _value(self, spec: Spec, kind: Kind, name: str, *, node: int = -1, data: Data | None = None) -> Value:
        self.values.append(Value(id=len(self.values), spec=spec, kind=kind, name=name, node=node, data=data))
        return self.values[-1]

    def _array(self, value: Value, view: View, requires_grad: bool, node: int = -1, position: int = 0) -> Array:
        self.num_arrays += 1
        return Array(self, self.num_arrays - 1, value.id, view, requires_grad, node, position)


OPERATORS: dict[str, Callable[..., Any]] = {}
"""What `+`, `@` and the methods of Array do; filled by `tape.operators`, so that this file knows no operation."""


class Array:
    """A handle: which value, seen how, made by which node. Arithmetic records; `numpy()` runs what it needs and returns data."""

    __slots__ = ("id", "node", "position", "requires_grad", "tape", "value", "view")
    __array_ufunc__ = None  # numpy_array + array must call our __radd__, not broadcast over us

    def __init__(self, tape: Tape, id: int, value: int, view: View, requires_grad: bool, node: int, position: int) -> None:
        self.tape, self.id, self.value, self.view = tape, id, value, view
        self.requires_grad, self.node, self.position = requires_grad, node, position

    @property
    def shape(self) -> Shape:
        return self.view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.view.dtype

    @property
    def ndim(self) -> int:
        return len(self.view.shape)

    @property
    def size(self) -> int:
        return self.view.spec.size

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        return (self[k] for k in range(len(self)))

    def __bool__(self) -> bool:
        raise Unsupported("the truth of a recorded array is not known while recording; call .numpy() to run it first.")

    @property
    def data(self) -> Data:
        """A leaf's own data, to read or to update in place between runs (`w.data -= rate * gradient`)."""
        data = self.tape.values[self.value].data
        if data is None:
            raise Unsupported("only leaves hold data; call .numpy() to compute this array.")
        return data

    def detach(self) -> Array:
        """The same value, through which no gradient flows."""
        return self.tape.constant_view(self)

    def numpy(self) -> Data:
        """Run what this array needs, every buffer freed at its last reader, and return its data."""
        data: Data = OPERATORS["numpy"](self)
        return data

    def __add__(self, other: Any) -> Array:
        return _operate("add", self, other)

    def __radd__(self, other: Any) -> Array:
        return _operate("add", self, other)

    def __sub__(self, other: Any) -> Array:
        return _operate("subtract", self, other)

    def __rsub__(self, other: Any) -> Array:
        return _operate("add", _operate("negate", self), other)

    def __mul__(self, other: Any) -> Array:
        return _operate("multiply", self, other)

    def __rmul__(self, other: Any) -> Array:
        return _operate("multiply", self, other)

    def __truediv__(self, other: Any) -> Array:
        return _operate("divide", self, other)

    def __rtruediv__(self, other: Any) -> Array:
        return _operate("multiply", _operate("power", self, -1), other)

    def __matmul__(self, other: Array) -> Array:
        return _operate("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Array:
        return _operate("matmul", self.tape.array(other, name="constant"), self)

    def __neg__(self) -> Array:
        return _operate("negate", self)

    def __pow__(self, exponent: float) -> Array:
        return _operate("power", self, exponent)

    def __getitem__(self, key: Any) -> Array:
        return _operate("get_item", self, key)

    def sum(self, axes: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Array:
        return _operate("sum", self, axes, keepdims=keepdims)

    def mean(self, axes: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Array:
        return _operate("mean", self, axes, keepdims=keepdims)

    def reshape(self, *shape: int) -> Array:
        return _operate("reshape", self, shape)

    @property
    def T(self) -> Array:  # noqa: N802  (NumPy's name)
        return _operate("transpose", self)


def _operate(name: str, *args: Any, **options: Any) -> Array:
    result: Array = OPERATORS[name](*args, **options)
    return result
