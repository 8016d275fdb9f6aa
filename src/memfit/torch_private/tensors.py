"""What torch knows about tensors, modules and ops and does not say in public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from memfit.core.errors import Unsupported
from memfit.torch_private.probe import Symbol

_USES = Symbol("torch._C._storage_Use_Count", "know whether somebody holds a replayed result")
_FOREACH_COPY = Symbol("torch._foreach_copy_", "update buffers together")
_DISABLE_AUTOCAST = Symbol("torch._C._DisableAutocast", "run planned ops without casting again")
_WILL_EXECUTE = Symbol("torch._C._will_engine_execute_node", "know which gradients a backward wants")
_PROFILER_ENABLED = Symbol("torch._C._autograd._profiler_enabled", "leave the user's profiler alone")
_OVERLOAD = Symbol("torch._ops.OpOverload", "tell ops from functions")
_SCHEMA = Symbol("torch.ops.aten.add.Tensor._schema", "read what an op takes and gives")
_DIRECT = Symbol("torch.ops.aten.add.Tensor._op", "call ops without the Python around them")
_STORAGE = Symbol("torch.UntypedStorage._cdata", "tell storages apart")
_HOOKS = Symbol("torch.Tensor._backward_hooks", "know whose gradients are watched")

_FUNCTORCH = Symbol("torch._C._functorch.peek_interpreter_stack", "refuse transforms of functions by name", optional=True)
_FORWARD_AD = Symbol("torch.autograd.forward_ad", "refuse forward-mode differentiation by name", optional=True)
_MODULES = Symbol("torch.nn.modules.module", "see hooks that are called for every module")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


def storage_key(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Equal for tensors over the same bytes, as long as those are alive."""
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return int(_STORAGE.of(storage))


def storage_uses(key: int) -> int:
    """How many hold the storage with this key."""
    return int(_USES()(key))


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether somebody asked to be told about a leaf's gradient."""
    return has_gradient_hooks(leaf) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether a hook may change a leaf's gradient before it is accumulated."""
    return bool(_HOOKS.of(leaf))


def own_tensors(module: nn.Module) -> tuple[Mapping[str, torch.Tensor | None], Mapping[str, torch.Tensor | None]]:
    """The module's own parameters and buffers, without those of its children, as it holds them."""
    return module._parameters, module._buffers


def copy_each(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values into targets, in as few launches as possible."""
    _FOREACH_COPY()(targets, values)


def disable_autocast() -> AbstractContextManager[None]:
    """Run ops as they are, on every device."""
    context: AbstractContextManager[None] = _DISABLE_AUTOCAST()()
    return context


def will_execute(node: Any) -> bool:
    """Whether the backward that runs now will come to this autograd node; torch.autograd.grad will not, and refuses the question."""
    ask = _WILL_EXECUTE()
    try:
        return bool(ask(node))
    except RuntimeError:
        return False


def is_profiling() -> bool:
    """Whether a profiler of torch is running."""
    return bool(_PROFILER_ENABLED()())


def is_op(target: Any) -> bool:
    """Whether this is an op of torch's dispatcher, not a Python function."""
    return isinstance(target, _OVERLOAD())


def direct_call(target: Any) -> Any:
    """What an op's own `__call__` calls, without the Python around it; anything else is itself."""
    return _DIRECT.of(target) if is_op(target) else target


def schema_of(target: Any) -> Any:
    """An op's schema: names, defaults and aliases of what it takes and gives. None for a Python function."""
    return _SCHEMA.of(target) if is_op(target) else None


def global_module_hooks() -> tuple[tuple[Any, ...], ...]:
    """Hooks that somebody registered for all modules, of every kind."""
    owner = _MODULES()
    return tuple(tuple(getattr(owner, name).values()) for name in _GLOBAL_HOOKS if hasattr(owner, name))


def require_plain_autograd() -> None:
    """Refuse to run inside what differentiates otherwise than `backward` does."""
    peek, forward_ad = _FUNCTORCH(), _FORWARD_AD()
    if peek is not None and peek() is not None:
        raise Unsupported("a fitted model was called inside a transform of torch.func (grad, vmap, ...): use the plain model there.")
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise Unsupported("a fitted model was called inside forward-mode differentiation: use the plain model there.")
