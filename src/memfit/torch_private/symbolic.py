"""Sizes that are no numbers yet: fake tensors with some sizes left open, and what a trace of them took for granted.

Sizes ── like(tensor, {1}) ──> fake tensor of s x 32 ── traced ──> graph over s, guards over s
  └───── at([tensors of another length]) ──> Numbers: each size of the graph as a number; None where a guard does not hold
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import Unsupported
from memfit.torch_private.fake import Mode, fake_mode
from memfit.torch_private.probe import Symbol

_NEED = "trace a step once for tensors of all lengths"
_ENVIRONMENT = Symbol("torch.fx.experimental.symbolic_shapes.ShapeEnv", _NEED)
_CONTEXT = Symbol("torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext", _NEED)
_DIMENSION = Symbol("torch.fx.experimental.symbolic_shapes.DimDynamic", _NEED)
_NUMBER = Symbol("sympy.Integer", _NEED)
_MARK = "_dynamo_weak_dynamic_indices"

Varying = Mapping[int, frozenset[int]]
"""Which dimensions of which tensors vary, tensors by their position in a call."""


def is_symbolic(value: Any) -> bool:
    """Whether this is a number that depends on sizes left open."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


@contextmanager
def marked_as_varying(tensors: Sequence[torch.Tensor], varying: Varying) -> Iterator[None]:
    """Inside it Dynamo leaves these sizes open where it can. The marks are gone afterwards: the tensors are the caller's."""
    ours = [(tensors[i], dims) for i, dims in varying.items() if not hasattr(tensors[i], _MARK)]
    try:
        for tensor, dims in ours:
            known: set[int] = getattr(tensor, _MARK, set())
            setattr(tensor, _MARK, known | dims)
        yield
    finally:
        for tensor, _ in ours:
            vars(tensor).pop(_MARK, None)


class Sizes:
    """The open sizes of one trace."""

    def __init__(self) -> None:
        self._environment: Any = _ENVIRONMENT()()
        self.mode: Mode = fake_mode(shape_env=self._environment, allow_non_fake_inputs=True)
        self._open: list[tuple[int, int, torch.SymInt]] = []  # of tensor i, dimension d
        self._holds: Any = None  # the guards of the trace, as code

    def like(self, tensor: torch.Tensor, position: int = -1, dims: frozenset[int] = frozenset()) -> Any:
        """A fake tensor with these sizes left open; a size of 0 or 1 is another matter, and stays."""
        mode: Any = self.mode
        if not dims:
            return mode.from_tensor(tensor, static_shapes=True)
        kinds = _DIMENSION()
        sizes = [kinds.DYNAMIC if d in dims else kinds.STATIC for d in range(tensor.dim())]
        fake = mode.from_tensor(tensor, symbolic_context=_CONTEXT()(dynamic_sizes=sizes))
        self._open += [(position, d, size) for d, size in enumerate(fake.shape) if isinstance(size, torch.SymInt)]
        return fake

    def close(self) -> None:
        """To be called after the trace: what it took for granted is known now. Looking at its sizes later must not add to it."""
        text = self._environment.produce_guards_expression([size for _, _, size in self._open])
        self._holds = compile(text, "<sizes>", "eval") if text else None
        self._environment.freeze()

    def at(self, tensors: Sequence[torch.Tensor]) -> Numbers | None:
        """The sizes of a call; None where the trace took for granted what does not hold for them."""
        found = [tensors[i].shape[d] for i, d, _ in self._open]
        if self._holds is not None and not self._environment.evaluate_guards_expression(self._holds, found):
            return None
        return Numbers({size.node._expr: number for (_, _, size), number in zip(self._open, found, strict=True)})


def formula_of(size: int | torch.SymInt) -> Any:
    """What `Numbers.of` takes: a number, or an expression over the open sizes."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_formula(value: Any) -> bool:
    """Whether `formula_of` made this of a size left open."""
    return hasattr(value, "xreplace")


class Numbers:
    """The sizes of a trace as numbers."""

    def __init__(self, values: Mapping[Any, int]) -> None:
        number = _NUMBER()
        self._values = {symbol: number(value) for symbol, value in values.items()}
        self._known: dict[Any, int] = {}

    @classmethod
    def of_symbols(cls, symbols: Sequence[torch.SymInt], numbers: Sequence[int]) -> Numbers:
        return cls({symbol.node._expr: number for symbol, number in zip(symbols, numbers, strict=True)})

    def of(self, formula: Any) -> int:
        if isinstance(formula, int):
            return formula
        found = self._known.get(formula)
        if found is None:
            value = formula.xreplace(self._values)
            if value.free_symbols:
                raise Unsupported(f"a size of the step depends on values ({formula})")
            found = self._known[formula] = int(value)
        return found

    def of_all(self, formulas: Sequence[Any]) -> tuple[int, ...]:
        return tuple([self.of(formula) for formula in formulas])
