"""Tracing functions and whole training steps into fx graphs over aten ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.torch_private.grouped_products import trace_grouped_products
from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.probe import Symbol
from memfit.torch_private.recurrent import trace_as_cells

_EXPORT = Symbol("torch._functorch.aot_autograd.aot_export_joint_with_descriptors", "trace forward and backward together")
_FUNCTORCH_CONFIG = Symbol("torch._functorch.config", "trace forward and backward together")
_MAKE_FX = Symbol("torch.fx.experimental.proxy_tensor.make_fx", "trace a function")
_IS_COMPILING = Symbol("torch.compiler._is_compiling_flag", "tell a model that it is traced")
_REGISTRY = Symbol("torch._dynamo.backends.registry", 'be a backend of torch.compile ("memfit")')

Table = Mapping[Any, Callable[..., Any]]
"""Ops to trace as something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """What the traced step does to an input."""

    mutates_data: bool
    mutates_metadata: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTrace:
    """A traced step, its inputs in order (parameters, buffers, tensors), and the outputs that share memory with others."""

    module: torch.fx.GraphModule
    num_parameters: int
    num_buffers: int
    inputs: tuple[InputFacts, ...]
    aliased_outputs: frozenset[int]


def trace_joint(module: nn.Module, tensors: Sequence[torch.Tensor], table: Table, *, model: nn.Module) -> JointTrace:
    """Forward and backward of `module(*tensors)` as one graph, without computing. `model` is what the module calls."""
    with ExitStack() as stack:
        stack.enter_context(_backward_outside_autocast())
        stack.enter_context(trace_as_cells(model))
        stack.enter_context(trace_grouped_products())
        exported = _EXPORT()(stack, module, tensors, decompositions=dict(table))
    metadata = exported._aot_state.fw_metadata
    shared = (
        i
        for i, info in enumerate(metadata.output_info)
        if info.requires_grad and info.output_type.name not in ("non_alias", "custom_function_view")
    )
    return JointTrace(
        module=exported.graph_module,
        num_parameters=len(exported.params_spec),
        num_buffers=len(exported.buffers_spec),
        inputs=tuple(
            InputFacts(mutates_data=info.mutates_data, mutates_metadata=info.mutates_metadata, requires_grad=info.requires_grad)
            for info in metadata.input_info
        ),
        aliased_outputs=frozenset(shared),
    )


@contextmanager
def _backward_outside_autocast() -> Iterator[None]:
    """As `loss.backward()` runs it."""
    config = _FUNCTORCH_CONFIG()
    with config.patch({"backward_pass_autocast": "off"} if hasattr(config, "backward_pass_autocast") else {}):
        yield


def trace_function(
    function: Callable[..., Any], samples: Sequence[Any], *, table: Table | None = None, mode: str = "fake"
) -> torch.fx.GraphModule:
    """The ops that `function(*samples)` runs."""
    traced: torch.fx.GraphModule = _MAKE_FX()(function, decomposition_table=table, tracing_mode=mode)(*samples)
    return traced


def say_compiling() -> AbstractContextManager[None]:
    """Inside it `torch.compiler.is_compiling()` is true, as it is while torch.export traces."""
    _IS_COMPILING()
    return patch_torch("trace a model that branches on values", Patch(torch.compiler, "_is_compiling_flag", True))


def register_backend(name: str, function: Callable[..., Any]) -> None:
    """Make `torch.compile(backend=name)` known, unless it is."""
    registry = _REGISTRY()
    if name not in registry.list_backends(exclude_tags=()):
        registry.register_backend(function, name=name)
