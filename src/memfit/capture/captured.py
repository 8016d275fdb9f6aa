"""What capture hands to profile and execute: the Graph, and what each op is in torch's terms.

Captured.calls[i]  runs op i:   target(*args, **kwargs) -> tensors `outputs`
Ref(t)             inside args stands for tensor t of the graph
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from memfit.core.graph import Graph, Variant
from memfit.kernels.implementation import Target, Work, work_of
from memfit.torch_private.trees import map_leaves


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor of the graph inside a call's arguments."""

    tensor: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """In the place of an output beside the loss that the step does not produce: what it would be like."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, output: torch.Tensor) -> LeftOut:
        return cls(output.shape, output.stride(), output.dtype, output.device)

    def stride(self) -> tuple[int, ...]:
        return self.strides


@dataclass(frozen=True, slots=True)
class LeftOutObject:
    """In the place of an output that is no tensor and holds tensors that the step would make: a cache of keys and values, say."""

    kind: type


def find_beside_the_loss(graded: Mapping[int, int]) -> frozenset[int]:
    """Of outputs that have a gradient, with their numbers of dimensions, those beside the one number that is the loss; none where there is no
    such number, or more."""
    losses = [k for k, dim in graded.items() if dim == 0]
    return frozenset(graded.keys() - losses) if len(losses) == 1 else frozenset()


class Role(Enum):
    """What an op is to an engine."""

    CALL = "call"  # run target(*args)
    BACKWARD_BEGINS = "backward_begins"  # outputs leave, gradients of outputs arrive
    ACCUMULATE = "accumulate"  # a gradient is put into .grad
    OPTIMIZER = "optimizer"  # the caller's optimizer.step(): seen by the plan, run by the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """`outputs[k]` is the tensor id of the target's k-th output, None where it returns none; `unpack` if it returns a tuple."""

    role: Role = Role.CALL
    target: Target | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[int | None, ...] = ()
    unpack: bool = False
    index: int = -1  # ACCUMULATE: position of the parameter or input among the sources
    keeps: bool = False  # ACCUMULATE: the gradient itself becomes .grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How values enter and leave. Sources are listed in call order: parameters, buffers, input tensors, constants.

    `outputs` are the model's output leaves: a tensor id, a plain value, or what stands for one that is
    left out. `differentiable` says which outputs have a
    gradient, in the order of `tangents`. `mutations` are (source position, tensor with its new value).
    """

    sources: tuple[int, ...]
    num_parameters: int
    num_buffers: int
    num_inputs: int
    outputs: tuple[Any, ...]
    output_spec: Any
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...]
    constants: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step. `samples[t]` is a fake tensor like tensor t: shape, strides, type and device without memory.

    `rereads` are positions of sources that forward changes and also computes with: running forward again needs their old
    values. `compiled`: its kernels round otherwise than the plain model's.
    """

    graph: Graph
    calls: tuple[OpCall, ...]
    convention: Convention
    samples: tuple[torch.Tensor | None, ...]
    device: torch.device
    has_backward: bool
    accumulates: bool
    variant_calls: tuple[tuple[OpCall, ...], ...] = ()  # per op, one call per variant
    fixed_workspace: tuple[tuple[int, int], ...] = ()  # (op, bytes) known without measuring: the loss outside, the optimizer step

    rereads: tuple[int, ...] = ()
    compiled: bool = False

    def call(self, op: int, variant: int = 0) -> OpCall:
        """How to run an op in one of its forms."""
        return self.calls[op] if variant == 0 else self.variant_calls[op][variant - 1]

    def variants_of(self, op: int) -> list[tuple[Variant, OpCall]]:
        """An op's other forms, and how to run them."""
        variants = self.graph.ops[op].variants
        return list(zip(variants, self.variant_calls[op], strict=True)) if variants else []

    def is_free(self, op: int) -> bool:
        """Views and bookkeeping: no kernel runs."""
        node = self.graph.ops[op]
        return self.calls[op].role is not Role.CALL or all(self.graph.is_view(node, t) for t in node.outputs)

    def keep_forms(self, kept: Sequence[Sequence[int]]) -> Captured:
        """The same step with these forms of each op, the first of them in the place of the plain one."""
        ops = tuple(op.keep_forms(forms) for op, forms in zip(self.graph.ops, kept, strict=True))
        return replace(
            self,
            graph=replace(self.graph, ops=ops, digest=""),
            calls=tuple(self.call(op, forms[0]) for op, forms in enumerate(kept)),
            variant_calls=tuple(tuple(self.call(op, v) for v in forms[1:]) for op, forms in enumerate(kept)),
        )

    def put_in_fixed_workspace(self, workspace_bytes: Iterable[int]) -> tuple[int, ...]:
        """Workspaces of all ops, with those that are known from elsewhere put in."""
        known = dict(self.fixed_workspace)
        return tuple(known.get(op, size) for op, size in enumerate(workspace_bytes))

    def work(self, call: OpCall) -> Work:
        """What running a call takes of any device, by the samples of what it reads and makes."""
        args, kwargs = map_leaves(lambda v: self.samples[v.tensor] if isinstance(v, Ref) else v, (call.args, dict(call.kwargs)))
        made = tuple(None if t is None else self.samples[t] for t in call.outputs)
        return work_of(call.target, made if call.unpack else made[0], args, kwargs)

    @property
    def leaves_out(self) -> bool:
        """Whether some outputs are not produced."""
        return any(isinstance(o, LeftOut | LeftOutObject) for o in self.convention.outputs)

    @property
    def has_outputs_beside_the_loss(self) -> bool:
        """Whether one number among the outputs is the loss, and others have a gradient too."""
        found = [o.tensor for o in self.convention.outputs if isinstance(o, Ref)]
        graded = {i: self.samples[found[i]] for i in self.convention.differentiable}
        return bool(find_beside_the_loss({i: t.dim() for i, t in graded.items() if t is not None}))

    @property
    def boundary(self) -> int:
        """The op at which backward begins, or the number of ops when there is no backward."""
        return next((i for i, c in enumerate(self.calls) if c.role is Role.BACKWARD_BEGINS), len(self.calls))
