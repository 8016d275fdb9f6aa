"""Fake tensors: shapes, strides and types without data, on which ops run without computing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memfit.torch_private.probe import Symbol
from memfit.torch_private.trees import map_leaves

_TENSOR = Symbol("torch._subclasses.fake_tensor.FakeTensor", "trace without computing")
_FUNCTIONAL = Symbol("torch._subclasses.functional_tensor.FunctionalTensor", "trace without computing")
_MODE = Symbol("torch._subclasses.fake_tensor.FakeTensorMode", "trace without computing")
_DATA_DEPENDENT = Symbol("torch._subclasses.fake_tensor.DataDependentOutputException", "step an optimizer that looks at its numbers")
_DISPATCH_MODE = Symbol("torch.utils._python_dispatch.TorchDispatchMode", "see the ops of an optimizer's step")
_NO_MODES = Symbol("torch.utils._python_dispatch._disable_current_modes", "compute with real values while tracing")
_NUM_MODES = Symbol("torch._C._len_torch_dispatch_stack", "tell a step from who watches it")
_NO_FUNCTIONS = Symbol("torch._C.DisableTorchFunction", "compute with real values while tracing")

Mode = AbstractContextManager[Any]
"""Inside it tensors are made fake."""


def fake_mode(**settings: Any) -> Mode:
    mode: Mode = _MODE()(**settings)
    return mode


def shared_fake_mode(tensors: Iterable[Any]) -> Mode:
    """The mode of the first tensor that is fake already, so that all share it; else a new one."""
    found = next((t.fake_mode for t in tensors if is_fake(t)), None)
    return found if found is not None else fake_mode()


def fake_type() -> Any:
    return _TENSOR()


def is_fake(tensor: Any) -> bool:
    return isinstance(tensor, _TENSOR())


def is_traced(tensor: Any) -> bool:
    """Whether a tensor belongs to a trace and has no values."""
    return isinstance(tensor, (_TENSOR(), _FUNCTIONAL()))


def fakes_like(tree: Any) -> Any:
    """The same nested arguments with a fake of each tensor: its shape, layout, type and device without its memory."""
    mode: Any = fake_mode()
    return map_leaves(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) and not is_fake(x) else x, tree)


def make_fake(
    mode: Mode, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int, storage_bytes: int
) -> torch.Tensor:
    """A fake tensor of this description, past the dispatcher: a step has hundreds."""
    bare = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if offset or bare.untyped_storage().nbytes() != storage_bytes:
        whole = torch.empty(-(-storage_bytes // dtype.itemsize), dtype=dtype, device="meta")
        bare = whole.as_strided(shape, strides, offset)
    made: torch.Tensor = _TENSOR()(mode, bare, device)
    return made


def answer_with(number: int, op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op; where it asks a fake tensor, which has none, for its value, that is `number`. Yes or no is not guessed."""
    try:
        return op(*args, **kwargs)
    except _DATA_DEPENDENT() as error:
        if not (args and is_fake(args[0])) or args[0].dtype is torch.bool or "_local_scalar_dense" not in str(op):
            raise
        del error
        return float(number) if args[0].dtype.is_floating_point else number


def leave_dispatch_modes() -> AbstractContextManager[Any]:
    """Inside it nobody watches ops: a meter of the user's is no part of a step. Costs nothing where there is none."""
    watched: AbstractContextManager[Any] = _NO_MODES()() if _NUM_MODES()() else nullcontext()
    return watched


@contextmanager
def leave_modes() -> Iterator[None]:
    """Around what is to run for real in the middle of a trace."""
    with _NO_MODES()(), _NO_FUNCTIONS()():
        yield


def watch_ops(run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Inside it every op is given to `run(op, args, kwargs)`, which runs it and gives its result."""

    class Watching(_DISPATCH_MODE()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, kwargs or {})

    mode: AbstractContextManager[Any] = Watching()
    return mode
