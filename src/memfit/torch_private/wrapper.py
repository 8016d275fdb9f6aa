"""Tensors that have a shape and a type, and no memory of their own."""

from __future__ import annotations

from typing import Any

from memfit.torch_private.probe import Symbol

_MAKE = Symbol("torch.Tensor._make_wrapper_subclass", "stand in for outputs that are not produced")
_AS_IT_IS = Symbol("torch._C._disabled_torch_function_impl", "stand in for outputs that are not produced")


def make_wrapper(cls: type, shape: Any, strides: Any, dtype: Any, device: Any) -> Any:
    """An instance of a subclass of torch.Tensor whose `__torch_dispatch__` does all there is to do."""
    return _MAKE()(cls, shape, strides=strides, dtype=dtype, device=device, requires_grad=False)


def skip_torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """For `__torch_function__` of a class whose results are of no special class."""
    return _AS_IT_IS()(func, types, args, kwargs or {})
