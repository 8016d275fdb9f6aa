"""Every change that a model's own structure offers: each attribute of each kind of module by its type, each parameter, buffer, hook, method.

Nothing here is picked by hand for a model: the changes are made from what `vars`, `modules` and `parameters` say of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from benchmarks.parts.guards import subjects
from benchmarks.parts.guards.subjects import Case

_HIDDEN = {
    "hidden_size",
    "input_size",
    "num_layers",
    "proj_size",
    "training",
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "num_features",
    "embed_dim",
    "normalized_shape",
    "seen",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`apply(case, root)` changes it, `root` being what the user calls; it may return what takes it back."""

    name: str
    apply: Callable[[Case, Any], Any]


def other(value: Any) -> Any:
    """Another value of the same type, None where this type has none to offer."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(v for v in type(value) if v is not value)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.5 + 0.125
    if isinstance(value, str):
        return {"zeros": "reflect", "mean": "sum", "none": "tanh"}.get(value, f"{value}'")
    if isinstance(value, tuple) and value and all(isinstance(v, (int, float)) for v in value):
        return (other(value[0]), *value[1:])
    if value is functional.relu:
        return torch.tanh
    return None


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The root, and the first module of every kind."""
    seen = set()
    for name, module in model.named_modules():
        if type(module) not in seen:
            seen.add(type(module))
            yield name, module


def _at(root: Any, path: str) -> Any:
    return root.get_submodule(path) if path else root


def attribute_changes(model: nn.Module) -> Iterator[Change]:
    for path, module in _places(model):
        for name, value in vars(module).items():
            if isinstance(module, nn.RNNBase) and name != "dropout":
                continue  # with another structure than its weights the plain layer reads past its memory
            if not name.startswith("_") and name not in _HIDDEN:
                yield from _changes_of(f"{path or 'root'}.{name}", value, lambda c, r, p=path, n=name: (_at(r, p), n))


def _changes_of(label: str, value: Any, find: Callable[[Case, Any], tuple[Any, str]]) -> Iterator[Change]:
    def assign(case: Case, root: Any, new: Any) -> None:
        owner, name = find(case, root)
        setattr(owner, name, new)

    if other(value) is not None:
        yield Change(name=f"{label} set", apply=lambda c, r: assign(c, r, other(value)))
    elif isinstance(value, list):
        yield Change(name=f"{label} appended to", apply=lambda c, r: getattr(*find(c, r)).append(1))
        yield Change(name=f"{label} item set", apply=lambda c, r: getattr(*find(c, r)).__setitem__(0, 3))
    elif isinstance(value, dict):
        for key, item in value.items():
            if other(item) is not None:
                yield Change(name=f"{label}[{key!r}] set", apply=lambda c, r, k=key, i=item: getattr(*find(c, r)).__setitem__(k, other(i)))
    elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        for key, item in vars(value).items():
            yield from _changes_of(f"{label}.{key}", item, lambda c, r, k=key: (getattr(*find(c, r)), k))


def module_changes(model: nn.Module) -> Iterator[Change]:
    for path, module in _places(model):
        label = path or "root"
        yield Change(name=f"{label}: forward hook that scales", apply=lambda c, r, p=path: _at(r, p).register_forward_hook(_scale_output))
        yield Change(name=f"{label}: forward hook that records", apply=lambda c, r, p=path: _at(r, p).register_forward_hook(_recorder(c)))
        yield Change(name=f"{label}: pre-hook", apply=lambda c, r, p=path: _at(r, p).register_forward_pre_hook(_scale_input))
        yield Change(name=f"{label}: backward hook", apply=lambda c, r, p=path: _at(r, p).register_full_backward_hook(_scale_gradient))
        yield Change(name=f"{label}: eval()", apply=lambda c, r, p=path: _at(r, p).eval())
        yield Change(name=f"{label}: forward patched on the instance", apply=lambda c, r, p=path: _patch_instance(_at(c.model, p)))
        yield Change(
            name=f"{label}: forward patched on the class", apply=lambda c, r, p=path: _patch_class(type(_at(c.model, p)), "forward")
        )
        if path:
            yield Change(name=f"{label}: class swapped", apply=lambda c, r, p=path: _swap_class(_at(r, p)))
            yield Change(name=f"{label}: replaced by its double", apply=lambda c, r, p=path: _wrap(r, p))
        del module


def tensor_changes(model: nn.Module) -> Iterator[Change]:
    names = [n for n, _ in model.named_parameters()]
    for name in dict.fromkeys((names[0], names[-1])):
        path, _, own = name.rpartition(".")

        def owner(r: Any, p: str = path) -> Any:
            return _at(r, p)

        yield Change(name=f"{name}: frozen", apply=lambda c, r, o=owner, n=own: getattr(o(r), n).requires_grad_(False))
        yield Change(
            name=f"{name}: replaced", apply=lambda c, r, o=owner, n=own: setattr(o(r), n, nn.Parameter(getattr(o(r), n).detach() * 2))
        )
        yield Change(
            name=f"{name}: data replaced", apply=lambda c, r, o=owner, n=own: setattr(getattr(o(r), n), "data", getattr(o(r), n).data * 2)
        )
        yield Change(name=f"{name}: hook", apply=lambda c, r, o=owner, n=own: getattr(o(r), n).register_hook(lambda g: g * 2))
        yield Change(name=f"{name}: other strides", apply=lambda c, r, o=owner, n=own: _restride(getattr(o(r), n)))
        if own == "weight":
            yield Change(name=f"{name}: parametrized", apply=lambda c, r, o=owner, n=own: nn.utils.parametrizations.weight_norm(o(r), n))
            yield Change(name=f"{name}: spectral norm", apply=lambda c, r, o=owner, n=own: nn.utils.parametrizations.spectral_norm(o(r), n))
    for name, _ in model.named_buffers():
        path, _, own = name.rpartition(".")
        yield Change(name=f"{name}: replaced", apply=lambda c, r, p=path, n=own: setattr(_at(r, p), n, getattr(_at(r, p), n) + 1))
        yield Change(name=f"{name}: None", apply=lambda c, r, p=path, n=own: setattr(_at(r, p), n, None))
        yield Change(name=f"{name}: in place", apply=lambda c, r, p=path, n=own: getattr(_at(r, p), n).add_(1))


def surrounding_changes(model: nn.Module) -> Iterator[Change]:
    yield Change(name="a global number", apply=lambda c, r: _swap(vars(subjects), "GAIN", 2.0))
    yield Change(name="a global dictionary", apply=lambda c, r: _swap(subjects.SETTINGS, "gain", 2.0))
    yield Change(name="a global function", apply=lambda c, r: _swap(vars(subjects), "shift", lambda x: x - 1))
    yield Change(name="a method of the class", apply=lambda c, r: _patch_class(subjects.Subject, "adjust"))
    yield Change(name="an environment variable", apply=lambda c, r: _swap(os.environ, "SUBJECT_GAIN", "2"))
    yield Change(name="a function of torch", apply=lambda c, r: _swap(vars(functional), "linear", _double(functional.linear)))
    yield Change(name="a hook on all modules", apply=lambda c, r: torch_module.register_module_forward_hook(_scale_linear).remove)
    yield Change(name="the default type", apply=lambda c, r: _swap_default_dtype())
    yield Change(name="autocast around", apply=lambda c, r: _enter(torch.autocast("cpu", torch.bfloat16, cache_enabled=False)))
    yield Change(name="deterministic algorithms", apply=lambda c, r: _swap_deterministic())
    yield Change(name="the loss's closure", apply=lambda c, r: c.weight.__setitem__("weight", 0.5))
    yield Change(name="gradients kept", apply=lambda c, r: [setattr(p, "grad", torch.ones_like(p)) for p in r.parameters()] and None)
    yield Change(name="requires_grad_(False) for all but the last", apply=lambda c, r: _freeze(r))
    loss = nn.CrossEntropyLoss()
    for name, value in vars(loss).items():
        if not name.startswith("_") and name != "training" and other(value) is not None:
            yield Change(name=f"loss.{name} set", apply=lambda c, r, n=name, v=value: setattr(c.loss_fn.loss, n, other(v)))
    del model


def changes_of(model: nn.Module) -> Iterator[Change]:
    """All of them, in the order in which they are made."""
    yield Change(name="nothing", apply=lambda c, r: None)
    yield from attribute_changes(model)
    yield from module_changes(model)
    yield from tensor_changes(model)
    yield from surrounding_changes(model)


# -- what the changes do -------------------------------------------------------------------------------------------------


def _scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(output, torch.Tensor) else None


def _scale_linear(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Linear) else None


def _scale_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2 if args[0].is_floating_point() else args[0], *args[1:])


def _scale_gradient(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in given)


def _recorder(case: Case) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        case.model.seen.append(7)  # type: ignore[union-attr, operator]

    return record


def _double(function: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return out * 2 if isinstance(out, torch.Tensor) else out

    return doubled


def _patch_instance(module: nn.Module) -> None:
    module.forward = _double(module.forward)  # type: ignore[method-assign]


def _patch_class(kind: type, name: str) -> Callable[[], None]:
    old = getattr(kind, name)
    setattr(kind, name, _double(old))
    return lambda: setattr(kind, name, old)


def _swap_class(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {"forward": _double(type(module).forward)})


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return out * 2 if isinstance(out, torch.Tensor) else out


def _wrap(root: Any, path: str) -> None:
    parent, _, name = path.rpartition(".")
    setattr(_at(root, parent), name, _Twice(_at(root, path)))


def _restride(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter.data.repeat_interleave(2, 0)[::2]


def _swap(mapping: Any, key: str, value: Any) -> Callable[[], None]:
    missing = key not in mapping
    old = mapping.get(key)
    mapping[key] = value
    return lambda: mapping.pop(key) if missing else mapping.__setitem__(key, old)


def _swap_default_dtype() -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def _swap_deterministic() -> Callable[[], None]:
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(False)


def _enter(context: Any) -> Callable[[], None]:
    stack = contextlib.ExitStack()
    stack.enter_context(context)
    return stack.close


def _freeze(root: Any) -> None:
    for p in list(root.parameters())[:-1]:
        p.requires_grad_(False)
