"""The joint graph, forward and backward, of a model, traced on fake tensors.

The model's parameters and buffers are handed in as inputs (tied ones once), the call is traced with its backward, and the
result is an fx graph over aten ops with a description on every input and output. Nothing is computed or allocated.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.capture.captured import LeftOut, LeftOutObject, find_beside_the_loss
from memfit.capture.guards.graph_model import GraphModel
from memfit.capture.inputs import Call
from memfit.capture.trace.fixes import decompositions
from memfit.capture.trace.gpu_attention import GpuAttention
from memfit.capture.trace.known_constants import KnownConstants
from memfit.capture.trace.provenance import line_of, recording_where
from memfit.core.errors import Unsupported
from memfit.torch_private.checkpoints import checkpoints_left_out
from memfit.torch_private.fake import Mode, is_fake, is_traced, shared_fake_mode
from memfit.torch_private.symbolic import Sizes, Varying
from memfit.torch_private.trace import JointTrace, say_compiling, trace_joint
from memfit.torch_private.trees import flatten, take_apart, tensors_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The traced step. `inputs`/`outputs` are torch's descriptors, in graph order. `sizes`: those that it leaves open, if any."""

    module: torch.fx.GraphModule
    output_spec: Any
    output_leaves: tuple[Any, ...]  # None where the graph gives a tensor, else the plain value
    num_parameters: int
    num_buffers: int
    num_checkpoints: int = 0  # torch.utils.checkpoint in the model, left out
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How to trace: with its backward or an inference, with the attention of a GPU that is not here, into which ops.

    `loss_only`: outputs beside the one number that is the loss are not produced. `varying`: sizes of inputs that are left open.
    """

    training: bool = True
    loss_only: bool = False
    gpu_attention: bool = False
    decompositions: Mapping[Any, Callable[..., Any]] | None = None  # None: ops as eager PyTorch runs them
    varying: Varying | None = None


_ONE_AT_A_TIME = threading.RLock()  # torch's tracer patches itself globally


def trace(
    model: nn.Module,
    call: Call,
    *,
    loss_fn: Callable[..., Any] | None = None,
    num_targets: int = 0,
    manner: Manner = Manner(),
) -> Joint:
    """Trace `model(call)`, or `loss_fn(model(inputs), *targets)` where the last `num_targets` positional arguments are targets."""
    with _ONE_AT_A_TIME:
        try:
            return _trace_separate(model, call, loss_fn, num_targets, manner)
        except _DataDependentError:
            # Models ask torch.compiler.is_compiling() before they branch on values, and have another way then. Only on demand:
            # the way without is the one the plain model takes, bit for bit.
            with say_compiling():
                return _trace_separate(model, call, loss_fn, num_targets, manner)


def _trace_separate(model: nn.Module, call: Call, loss_fn: Callable[..., Any] | None, num_targets: int, manner: Manner) -> Joint:
    """Outputs that share memory with each other or with inputs are given their own, and the step is traced again."""
    cloned: frozenset[int] = frozenset()
    for _ in range(2):
        step = _Step(model, call, loss_fn, num_targets, cloned, loss_only=manner.loss_only, varying=manner.varying)
        joint, aliases = _export(model, step, manner)
        if not aliases:
            break
        cloned = aliases
    return joint


class _DataDependentError(Unsupported):
    """The trace met a branch or a shape that depends on tensor values."""


class _Step(nn.Module):
    """Takes parameters and buffers as its own, so that each appears once however often the model ties it."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        loss_fn: Callable[..., Any] | None,
        num_targets: int,
        cloned: frozenset[int],
        *,
        loss_only: bool = False,
        varying: Varying | None = None,
    ) -> None:
        super().__init__()
        self._loss_only = loss_only
        self._plain = (model, call, loss_fn, num_targets, cloned)  # in a tuple: not registered as a submodule
        self._names: list[tuple[str, str]] = []
        self.sizes = Sizes() if varying else None
        take: Callable[[torch.Tensor], Any] = partial(
            _movable, mode=shared_fake_mode((*model.parameters(), *model.buffers(), *call.tensors))
        )
        if self.sizes is not None and varying:
            take = partial(_held, sizes=self.sizes)
            self.tensors = tuple(self.sizes.like(t, i, varying.get(i, frozenset())) for i, t in enumerate(call.tensors))
        else:
            self.tensors = tuple(map(take, call.tensors))
        for i, (name, parameter) in enumerate(model.named_parameters()):
            self.register_parameter(f"parameter_{i}", take(parameter))
            self._names.append((f"parameter_{i}", name))
        for i, (name, buffer) in enumerate(model.named_buffers()):
            self.register_buffer(f"buffer_{i}", take(buffer))
            self._names.append((f"buffer_{i}", name))
        self.output_spec: Any = None
        self.output_leaves: tuple[Any, ...] = ()
        self.num_checkpoints = 0

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        model, call, loss_fn, num_targets, cloned = self._plain
        args, kwargs = call.rebuild(tensors)
        inputs, targets = (args[: len(args) - num_targets], args[len(args) - num_targets :]) if num_targets else (args, ())
        state = {name: getattr(self, own) for own, name in self._names}
        with checkpoints_left_out() as met:
            if isinstance(model, GraphModel):
                result = model.call_with(state, inputs)
            else:
                result = torch.func.functional_call(model, state, inputs, kwargs)
            if loss_fn is not None:
                result = loss_fn(result, *targets)
        self.num_checkpoints = model.num_checkpoints if isinstance(model, GraphModel) else len(met)
        leaves, self.output_spec = flatten(take_apart(result))
        graded = {i: x.dim() for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad}
        beside = find_beside_the_loss(graded) if self._loss_only else frozenset()
        leaves = [LeftOut.like(x) if i in beside else x for i, x in enumerate(leaves)]
        leaves = [LeftOutObject(type(x)) if any(map(is_traced, tensors_inside(x))) else x for x in leaves]
        self.output_leaves = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        found = [x for x in leaves if isinstance(x, torch.Tensor)]
        return [x.clone() if i in cloned else x for i, x in enumerate(found)]


def _device(step: _Step) -> torch.device:
    return next((t.device for t in (*step.parameters(), *step.buffers(), *step.tensors)), torch.device("cpu"))


def _movable(tensor: torch.Tensor, mode: Mode) -> Any:
    """A tensor on the meta device becomes a fake one on the CPU, so that the ops traced are those of a real device."""
    if tensor.device.type != "meta" or is_fake(tensor):
        return tensor
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake


def _held(tensor: torch.Tensor, sizes: Sizes) -> Any:
    """A parameter or buffer of a trace with open sizes: its own are numbers."""
    fake = sizes.like(tensor)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _export(model: nn.Module, step: _Step, manner: Manner) -> tuple[Joint, frozenset[int]]:
    table = decompositions(_device(step)) if manner.decompositions is None else dict(manner.decompositions)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(manner.training))
        stack.enter_context(recording_where(model))
        if step.sizes is None:  # those are worked out for real, which would fix the sizes
            stack.enter_context(KnownConstants())
        if manner.gpu_attention:
            stack.enter_context(GpuAttention())
        try:
            traced = trace_joint(step, step.tensors, table, model=model)
        except Unsupported:
            raise
        except Exception as error:
            raise _refusal(error) from error
    _check_mutations(traced, step)
    assert step.output_spec is not None
    if step.sizes is not None:
        step.sizes.close()
    joint = Joint(
        module=traced.module,
        output_spec=step.output_spec,
        output_leaves=step.output_leaves,
        num_parameters=traced.num_parameters,
        num_buffers=traced.num_buffers,
        num_checkpoints=step.num_checkpoints,
        sizes=step.sizes,
    )
    return joint, traced.aliased_outputs - step._plain[4]


def _check_mutations(traced: JointTrace, step: _Step) -> None:
    num_state = len(step._names)
    for position, info in enumerate(traced.inputs):
        if info.mutates_metadata:
            raise Unsupported(
                f"input {position - num_state} has its shape or strides changed in place: pass a copy, or change it outside the model."
            )
        if info.mutates_data and position >= num_state and info.requires_grad:
            raise Unsupported(
                f"input {position - num_state} requires a gradient and is overwritten in place: clone it inside the model first."
            )


def _refusal(error: Exception) -> Unsupported:
    """Name the unsupported thing, and the way round it."""
    text, kind, line = str(error), type(error).__name__, line_of(error)
    at = f" at {line}" if line else ""
    if (
        "DataDependent" in kind
        or "DynamicOutputShape" in kind
        or "data-dependent" in text
        or "GuardOnDataDependent" in kind
        or "_local_scalar_dense" in text
    ):
        return _DataDependentError(
            f"the model's control flow or shapes depend on tensor values{at} ({_first_line(text)}), so one plan cannot serve every step: "
            "use torch.where or fixed shapes, or fit the part of the model without it."
        )
    if (
        "Cannot access data pointer" in text
        or "non-Fake Tensor" in text
        or "convert all Tensors to FakeTensors" in text
        or "fake mode" in text.lower()
    ):
        return Unsupported(
            f"the model uses a tensor that is neither a parameter, a buffer nor an input{at} ({_first_line(text)}): register it with register_buffer."
        )
    return Unsupported(
        f"the model could not be traced{at} ({kind}: {_first_line(text)}): check that it runs on these inputs; fit a smaller part of it."
    )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no message"
