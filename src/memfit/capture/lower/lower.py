"""The traced fx graph -> Captured: storages instead of tensors, multi-output ops as one op, and four kinds of ops that fx
does not have.

    forward ops ... | backward begins | ... backward ops, accumulate after each gradient ... | optimizer step

*Backward begins* reads what forward must have made (outputs, new buffer values) and brings the outputs' gradients.
*Accumulate* puts a gradient into .grad: it stays there (a result) or, when .grad exists already, is added and goes.
*Optimizer step* is the caller's, with its state and temporaries, so that the plan covers the whole step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.captured import Captured, Convention, OpCall, Ref, Role
from memfit.capture.lower.mutated_sources import rereads
from memfit.capture.lower.optimizer_bytes import OptimizerBytes
from memfit.capture.lower.storages import allocated_bytes, granularity_of, round_up, viewed_argument
from memfit.capture.trace.fixes import is_put_right, real_sample, wide_output_bytes
from memfit.capture.trace.joint_graph import Joint
from memfit.capture.trace.provenance import where_of
from memfit.core.errors import Unsupported
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor
from memfit.kernels.implementation import Implementation
from memfit.torch_private.tensors import is_op, schema_of, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What lowering must know beyond the graph: the real tensors behind the sources, and what surrounds the step."""

    sources: Sequence[torch.Tensor]  # parameters, buffers, inputs, in call order
    names: Sequence[str]
    accumulates: bool  # .grad exists before the step
    optimizer: OptimizerBytes | None = None
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Plain:
    """A number among an op's outputs, known while tracing."""

    value: int | float | bool


def lower(joint: Joint, setting: Setting) -> Captured:
    lowering = _Lowering(joint, setting)
    for node in joint.module.graph.nodes:
        lowering.visit(node)
    return lowering.finish()


class _Lowering:
    def __init__(self, joint: Joint, setting: Setting) -> None:
        self.joint, self.setting = joint, setting
        self.device = next((t.device for t in setting.sources if t.device.type != "meta"), torch.device("cpu"))
        self.granularity = granularity_of(self.device)
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.samples: list[torch.Tensor | None] = []
        self.ops: list[Op] = []
        self.calls: list[OpCall] = []
        self.value_of: dict[torch.fx.Node, Any] = {}  # node -> tensor id, or tuple of tensor ids for several outputs
        self.storage_of_source: dict[int, int] = {}
        self.sources: list[int] = []
        self.constants: list[torch.Tensor] = []
        self.tangent_nodes: list[torch.fx.Node] = []
        self.results: list[int] = []
        self.output_node = next(n for n in reversed(joint.module.graph.nodes) if n.op == "output")
        self.descriptors = self.output_node.meta["desc"]
        self.begun = False
        self.gradients = self._gradient_outputs()  # by the node that makes them

    # -- nodes in graph order ------------------------------------------------------------------------------------

    def visit(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            self._visit_placeholder(node)
        elif node.op == "get_attr":
            self._visit_constant(node)
        elif node.op == "call_function" and node.target is operator.getitem:
            self._visit_getitem(node)
        elif node.op == "call_function":
            self._visit_call(node)

    def _visit_placeholder(self, node: torch.fx.Node) -> None:
        if type(node.meta["desc"]).__name__ == "TangentAOTInput":
            self.tangent_nodes.append(node)
            return
        position = len(self.sources)
        if position >= len(self.setting.sources):
            raise Unsupported(
                f"the traced step has an input memfit does not know ({node.meta['desc']}): fit the model without tensor subclasses."
            )
        kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)
        joint = self.joint
        kind = kinds[(position >= joint.num_parameters) + (position >= joint.num_parameters + joint.num_buffers)]
        self._add_source(node, self.setting.sources[position], kind, self.setting.names[position])

    def _visit_constant(self, node: torch.fx.Node) -> None:
        value: Any = self.joint.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise Unsupported(
                f"the traced step contains a sub-graph ({node.target}): higher-order ops such as cond or flex_attention cannot be planned yet."
            )
        self.constants.append(value)
        self._add_source(node, value, Kind.BUFFER, str(node.target))

    def _add_source(self, node: torch.fx.Node, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        if tensor.layout is not torch.strided:
            raise Unsupported(f"{name} is a {tensor.layout} tensor: memfit plans dense tensors; convert it with to_dense().")
        sample = node.meta.get("val", tensor)
        key, size_bytes = _storage_identity(tensor, self.granularity)
        if key not in self.storage_of_source:
            self.storage_of_source[key] = self._new_storage(size_bytes, kind, name)
        tensor_id = self._new_tensor(self.storage_of_source[key], sample, name)
        self.sources.append(tensor_id)
        self.results.append(tensor_id)
        self.value_of[node] = tensor_id

    def _visit_getitem(self, node: torch.fx.Node) -> None:
        parent, index = node.args
        assert isinstance(parent, torch.fx.Node)
        assert isinstance(index, int)
        self.value_of[node] = self.value_of[parent][index]

    def _visit_call(self, node: torch.fx.Node) -> None:
        if not self.begun and any(a in self.tangent_nodes for a in node.all_input_nodes):
            self._begin_backward()
        sample = node.meta.get("val")
        unpack = isinstance(sample, (tuple, list))
        target: Any = node.target
        samples = list(sample) if isinstance(sample, (tuple, list)) else [sample]
        refs: dict[Any, Any] = {n: self._argument_value(n) for n in node.all_input_nodes}
        outputs: list[Any] = [self._output(node, k, s) for k, s in enumerate(samples)]
        inputs = tuple(dict.fromkeys(r.tensor for r in refs.values() if isinstance(r, Ref)))
        self._add_op(
            Op(
                id=len(self.ops),
                name=_name(node.target),
                inputs=inputs,
                outputs=tuple(t for t in outputs if isinstance(t, int)),
                seeded=_is_seeded(node),
                where=where_of(node),
            ),
            OpCall(
                target=target,
                args=torch.fx.node.map_arg(node.args, refs.__getitem__),
                kwargs=torch.fx.node.map_arg(node.kwargs, refs.__getitem__),
                outputs=tuple(t if isinstance(t, int) else None for t in outputs),
                unpack=unpack,
            ),
        )
        self.value_of[node] = tuple(outputs) if unpack else outputs[0]
        self._accumulate_ready(node)

    def _argument_value(self, node: torch.fx.Node) -> Any:
        value = self.value_of[node]
        return value.value if isinstance(value, _Plain) else Ref(value)

    def _output(self, node: torch.fx.Node, position: int, sample: Any) -> int | _Plain | None:
        """A tensor id, a plain number that some ops return beside tensors (attention's lengths), or None."""
        if isinstance(sample, (int, float, bool)):
            return _Plain(sample)
        if not isinstance(sample, torch.Tensor):
            if sample is not None:
                raise Unsupported(f"{_name(node.target)} returns a {type(sample).__name__}: sizes that depend on values cannot be planned.")
            return None
        argument = viewed_argument(node.target, position)
        if argument is not None:
            base = _argument(node, argument)
            if isinstance(base, torch.fx.Node):
                return self._new_tensor(self.tensors[self.value_of[base]].storage, sample, node.name)
        wide = None
        if is_put_right(node.target):
            given = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
            sample, wide = real_sample(node.target, position, sample, given), wide_output_bytes(node.target, given)
        size_bytes = allocated_bytes(sample, self.granularity) if wide is None else round_up(wide, self.granularity)
        return self._new_tensor(self._new_storage(size_bytes, Kind.TEMPORARY, node.name), sample, node.name)

    # -- the ops that fx does not have -----------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """Everything forward must deliver is read here; the gradients of the outputs arrive."""
        self.begun = True
        needed = [self.value_of[n] for n in self._forward_outputs() if isinstance(n, torch.fx.Node) and n in self.value_of]
        tangents = []
        for node in self.tangent_nodes:
            sample = node.meta["val"]
            storage = self._new_storage(allocated_bytes(sample, self.granularity), Kind.GRADIENT, node.name)
            self.value_of[node] = self._new_tensor(storage, sample, node.name)
            tangents.append(self.value_of[node])
        self._add_op(
            Op(
                id=len(self.ops),
                name="memfit.backward_begins",
                inputs=tuple(dict.fromkeys(needed)),
                outputs=tuple(tangents),
                replayable=False,
            ),
            OpCall(role=Role.BACKWARD_BEGINS, outputs=tuple(tangents)),
        )
        self.results.extend(tangents)  # autograd holds them until backward returns
        for node in self.tangent_nodes:
            self._accumulate_ready(node)

    def _accumulate_ready(self, node: torch.fx.Node) -> None:
        """Right after a gradient is made it goes into .grad, so that no second full set of gradients builds up."""
        if self.begun:
            for source, produced in self.gradients.get(node, ()):
                self._accumulate(source, self._value(produced))

    def _value(self, node: torch.fx.Node) -> int:
        if node not in self.value_of:
            self._visit_getitem(node)
        value = self.value_of[node]
        assert isinstance(value, int)
        return value

    def _accumulate(self, source: int, gradient: int) -> None:
        sample = self.samples[gradient]
        assert sample is not None
        added = self.setting.accumulates and source < self.joint.num_parameters
        keeps = not added and self._can_keep(source, gradient)
        size = 0 if added or keeps else allocated_bytes(sample, self.granularity)
        token = self._new_tensor(self._new_storage(size, Kind.GRADIENT, "gradient"), sample, "gradient")
        self.results.extend((gradient, token) if keeps else (token,))  # a kept gradient is .grad itself
        self._add_op(
            Op(id=len(self.ops), name="memfit.accumulate", inputs=(gradient,), outputs=(token,), replayable=False),
            OpCall(role=Role.ACCUMULATE, args=(Ref(gradient),), outputs=(token,), index=source, keeps=keeps),
        )

    def _can_keep(self, source: int, gradient: int) -> bool:
        """Whether .grad can be this very tensor, as autograd does: the parameter's layout, and storage of its own."""
        grad, owner = self.samples[gradient], self.samples[self.sources[source]]
        assert grad is not None
        assert owner is not None
        storage = self.tensors[gradient].storage
        own = storage not in {self.tensors[t].storage for t in (*self.sources, *self.results)}
        sole = self.storages[storage].size_bytes == allocated_bytes(grad, self.granularity)
        return own and sole and grad.stride() == owner.stride() and grad.dtype == owner.dtype

    def _optimizer_step(self) -> None:
        optimizer = self.setting.optimizer
        if optimizer is None:
            return
        state = self._new_storage(round_up(optimizer.state_bytes, self.granularity), Kind.OPTIMIZER, "optimizer state")
        state_tensor = self._new_tensor(state, None, "optimizer state")
        self.optimizer_source = state_tensor
        tokens = tuple(t for op in self.ops if op.name == "memfit.accumulate" for t in op.outputs)
        done = self._new_tensor(self._new_storage(0, Kind.OPTIMIZER, "step done"), None, "step done")
        self.results.extend((state_tensor, done))
        self._add_op(
            Op(id=len(self.ops), name="memfit.optimizer_step", inputs=(*tokens, state_tensor), outputs=(done,), replayable=False),
            OpCall(role=Role.OPTIMIZER, outputs=(done,)),
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> Captured:
        convention = self._convention()
        has_backward = self.begun
        extra_sources: list[int] = []
        if has_backward:
            if self.setting.accumulates:
                extra_sources.append(self._gradients_present())
            self._optimizer_step()
            if self.setting.optimizer is not None:
                extra_sources.append(self.optimizer_source)
        self.results.extend(t for t in convention.outputs if isinstance(t, Ref) for t in (t.tensor,))
        if not has_backward:
            self.results.extend(t for _, t in convention.mutations)
        graph = self._graph(extra_sources)
        kept = rereads(graph, convention)
        if kept and has_backward:
            graph = self._graph([*extra_sources, self._copies_of(kept)])
        return Captured(
            graph=graph,
            calls=tuple(self.calls),
            convention=convention,
            samples=tuple(self.samples),
            device=self.device,
            has_backward=has_backward,
            accumulates=self.setting.accumulates,
            fixed_workspace=self._fixed_workspace(),
            rereads=kept,
        )

    def _graph(self, extra_sources: list[int]) -> Graph:
        return Graph(
            ops=tuple(self.ops),
            tensors=tuple(self.tensors),
            storages=self._with_kinds(),
            sources=(*self.sources, *extra_sources),
            results=tuple(dict.fromkeys(self.results)),
        )

    def _copies_of(self, positions: tuple[int, ...]) -> int:
        """Buffers that forward reads and changes, as they were before: a step keeps them to its end, to compute from them again."""
        found = (self.samples[self.sources[i]] for i in positions)
        size = sum(allocated_bytes(sample, self.granularity) for sample in found if sample is not None)
        tensor = self._new_tensor(self._new_storage(size, Kind.BUFFER, "buffers before they change"), None, "buffers before they change")
        self.results.append(tensor)
        return tensor

    def _fixed_workspace(self) -> tuple[tuple[int, int], ...]:
        """The caller's own temporaries: of a loss outside the plan, and of the optimizer's step."""
        known = {
            Role.BACKWARD_BEGINS: self.setting.reserve_bytes,
            Role.OPTIMIZER: self.setting.optimizer.temporary_bytes if self.setting.optimizer else 0,
        }
        return tuple((i, known[c.role]) for i, c in enumerate(self.calls) if known.get(c.role))

    def _gradients_present(self) -> int:
        """The gradients of earlier micro-steps, there from the start."""
        size = sum(
            round_up(self.setting.sources[i].numel() * self.setting.sources[i].element_size(), self.granularity)
            for i in range(self.joint.num_parameters)
            if self.setting.sources[i].requires_grad
        )
        tensor = self._new_tensor(self._new_storage(size, Kind.GRADIENT, "gradients of earlier steps"), None, "earlier gradients")
        self.results.append(tensor)
        return tensor

    def _convention(self) -> Convention:
        joint = self.joint
        outputs: list[Any] = []
        mutations: list[tuple[int, int]] = []
        plain: dict[int, int] = {}
        for node, descriptor in zip(self.output_node.args[0], self.descriptors, strict=True):
            name = type(descriptor).__name__
            if name == "PlainAOTOutput":
                plain[descriptor.idx] = self.value_of[node]
            elif name == "InputMutationAOTOutput":
                mutations.append((self._source_position(descriptor.mutated_input), self.value_of[node]))
        position = 0
        for leaf in joint.output_leaves:
            if leaf is None and position < len(plain):
                outputs.append(Ref(plain[position]))
                position += 1
            else:
                outputs.append(leaf)
        tensor_ids = [o.tensor for o in outputs if isinstance(o, Ref)]
        differentiable = tuple(self._output_of(n) for n in self.tangent_nodes)
        assert all(0 <= d < len(tensor_ids) for d in differentiable)
        return Convention(
            sources=tuple(self.sources),
            num_parameters=joint.num_parameters,
            num_buffers=joint.num_buffers,
            num_inputs=len(self.setting.sources) - joint.num_parameters - joint.num_buffers,
            outputs=tuple(outputs),
            output_spec=joint.output_spec,
            differentiable=differentiable,
            tangents=tuple(self.value_of[n] for n in self.tangent_nodes if n in self.value_of),
            mutations=tuple(mutations),
            constants=tuple(self.constants),
        )

    def _output_of(self, tangent: torch.fx.Node) -> int:
        """Which output a gradient comes in for."""
        output = tangent.meta["desc"].output
        if type(output).__name__ == "InputMutationAOTOutput":
            name = self.setting.names[self._source_position(output.mutated_input)]
            raise Unsupported(
                f"{name} is overwritten by forward, and the step is differentiated with respect to it: change it outside the model, between steps."
            )
        return int(output.idx)

    def _source_position(self, descriptor: Any) -> int:
        placeholders = [n for n in self.joint.module.graph.nodes if n.op == "placeholder"]
        return next(i for i, n in enumerate(placeholders) if n.meta["desc"] == descriptor)

    def _forward_outputs(self) -> list[Any]:
        pairs = zip(self.output_node.args[0], self.descriptors, strict=True)
        return [n for n, d in pairs if type(d).__name__ in ("PlainAOTOutput", "InputMutationAOTOutput")]

    def _gradient_outputs(self) -> dict[torch.fx.Node, list[tuple[int, torch.fx.Node]]]:
        """Per node that makes gradients (source position, node of its gradient), for every gradient of the step."""
        placeholders = {n.meta["desc"]: i for i, n in enumerate(n for n in self.joint.module.graph.nodes if n.op == "placeholder")}
        found: dict[torch.fx.Node, list[tuple[int, torch.fx.Node]]] = {}
        for node, descriptor in zip(self.output_node.args[0], self.descriptors, strict=True):
            if type(descriptor).__name__ == "GradAOTOutput" and isinstance(node, torch.fx.Node):
                owner: Any = node.args[0] if node.target is operator.getitem else node
                found.setdefault(owner, []).append((placeholders[descriptor.grad_of], node))
        return found

    def _with_kinds(self) -> tuple[Storage, ...]:
        """Activations are what forward makes and backward reads; gradients what .grad keeps; the rest is temporary."""
        boundary = next((op.id for op in self.ops if op.name == "memfit.backward_begins"), len(self.ops))
        kinds = {s.id: s.kind for s in self.storages}
        made_forward = {self.tensors[t].storage for op in self.ops[:boundary] for t in op.outputs}
        for op in self.ops[boundary + 1 :]:
            for t in op.inputs:
                storage = self.tensors[t].storage
                if storage in made_forward and kinds[storage] is Kind.TEMPORARY:
                    kinds[storage] = Kind.ACTIVATION
        for op, call in zip(self.ops, self.calls, strict=True):
            if call.keeps:
                kinds[self.tensors[op.inputs[0]].storage] = Kind.GRADIENT
        return tuple(replace(s, kind=kinds[s.id]) for s in self.storages)

    def _new_storage(self, size_bytes: int, kind: Kind, name: str) -> int:
        self.storages.append(Storage(id=len(self.storages), size_bytes=size_bytes, kind=kind, name=name))
        return len(self.storages) - 1

    def _new_tensor(self, storage: int, sample: torch.Tensor | None, name: str) -> int:
        self.tensors.append(Tensor(id=len(self.tensors), storage=storage, name=name))
        self.samples.append(sample)
        return len(self.tensors) - 1

    def _add_op(self, op: Op, call: OpCall) -> None:
        self.ops.append(op)
        self.calls.append(call)


def _storage_identity(tensor: torch.Tensor, granularity: int) -> tuple[int, int]:
    """Two sources over one storage (flattened RNN weights, views) are one storage."""
    try:
        storage = tensor.untyped_storage()
        return storage_key(storage), round_up(storage.nbytes(), granularity)
    except (NotImplementedError, RuntimeError):
        return id(tensor), round_up(tensor.numel() * tensor.element_size(), granularity)


def _argument(node: torch.fx.Node, position: int) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(schema_of(node.target).arguments[position].name)


def _name(target: Any) -> str:
    if is_op(target):
        return str(target)
    return f"memfit.{target.name}" if isinstance(target, Implementation) else str(target)


def _is_seeded(node: torch.fx.Node) -> bool:
    """Whether an op draws random numbers. Attention without dropout does not, though its kernels are marked as if they did."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True
