"""From recorded nodes to the core's Graph, with everything an executor needs beside it.

    tape (nodes, values, views) ── compile_program([loss, grads]) ──> Program: Graph + Costs + one Call per op

Only what the results need is compiled, in recorded order. Every value is one storage and one tensor; views are folded into
the Calls that read them. Ops that may overwrite a dying input carry that as variants, so one graph serves every planner
and every memory mode. Leaves are sources *and* results: the caller holds them throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.costs import Costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.tape.array import Array, Kernel, Node, Tape
from memfit.tape.array_view import Data, Spec, View

_FLOPS_PER_NS = 10.0
_BYTES_PER_NS = 5.0
_CALL_NS = 2_000
"""A rough two-core laptop, for planning before anything was measured; `measure.measure_costs` replaces these times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How to run one op: which tensors it reads through which views, what it writes, what scratch it needs."""

    kernel: Kernel
    inputs: tuple[tuple[int, View], ...]
    outputs: tuple[tuple[int, View], ...]
    scratch: tuple[Spec, ...]

    @property
    def scratch_bytes(self) -> int:
        return sum(s.buffer_bytes for s in self.scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled tape. `results` are the asked-for arrays as (tensor, view); `leaves` the data of the sources, by tensor."""

    graph: Graph
    costs: Costs
    calls: tuple[Call, ...]
    results: tuple[tuple[int, View], ...]
    leaves: tuple[tuple[int, Data], ...]
    leaf_values: tuple[int, ...]  # the tape's value behind each leaf, to feed other data
    num_forward_ops: int  # ops recorded outside gradients(), which may be interleaved with backward ones
    is_backward: tuple[bool, ...]


def compile_program(results: Sequence[Array], *, inplace: bool = True) -> Program:
    """The graph of everything that `results` need. `inplace=False` leaves the in-place variants out."""
    if not results:
        raise BadInput("a program needs at least one result.")
    tape = results[0].tape
    nodes = _find_needed(tape, [r.value for r in results])
    values = sorted({x.value for n in nodes for x in (*n.inputs, *n.outputs)} | {r.value for r in results})
    tensor_of = {value: k for k, value in enumerate(values)}
    gradients = {r.value for r in results if tape.values[r.value].kind is Kind.TEMPORARY}
    sources = [v for v in values if tape.values[v].node < 0]
    held = {*sources, *(r.value for r in results)}
    graph = Graph(
        ops=tuple(_op(tape, n, k, tensor_of, held if inplace else None) for k, n in enumerate(nodes)),
        tensors=tuple(Tensor(id=k, storage=k, name=tape.values[v].name) for k, v in enumerate(values)),
        storages=tuple(_storage(tape, v, k, v in gradients) for k, v in enumerate(values)),
        sources=tuple(tensor_of[v] for v in sources),
        results=tuple(dict.fromkeys(tensor_of[v] for v in (*(r.value for r in results), *sources))),
    )
    calls = tuple(_call(n, tensor_of) for n in nodes)
    return Program(
        graph=graph,
        costs=_rough_costs(graph, nodes, calls),
        calls=calls,
        results=tuple((tensor_of[r.value], r.view) for r in results),
        leaves=tuple((tensor_of[v], _data(tape, v)) for v in sources),
        leaf_values=tuple(sources),
        num_forward_ops=sum(not n.backward for n in nodes),
        is_backward=tuple(n.backward for n in nodes),
    )


def _find_needed(tape: Tape, values: Sequence[int]) -> list[Node]:
    """Computing nodes that these values need, in recorded order."""
    waiting = [tape.values[v].node for v in values]
    found: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node >= 0 and node not in found:
            found.add(node)
            waiting.extend(tape.values[x.value].node for x in tape.nodes[node].inputs)
    return [tape.nodes[n] for n in sorted(found)]


def _data(tape: Tape, value: int) -> Data:
    data = tape.values[value].data
    assert data is not None, "a source is a leaf, and leaves carry data"
    return data


def _storage(tape: Tape, value: int, id: int, is_gradient: bool) -> Storage:
    fact = tape.values[value]
    kind = Kind.GRADIENT if is_gradient else fact.kind
    return Storage(id=id, size_bytes=fact.spec.buffer_bytes, kind=kind, name=fact.name)


def _op(tape: Tape, node: Node, id: int, tensor_of: dict[int, int], held: set[int] | None) -> Op:
    inputs = tuple(dict.fromkeys(tensor_of[x.value] for x in node.inputs))
    outputs = tuple(tensor_of[x.value] for x in node.outputs)
    variants: tuple[Variant, ...] = ()
    if held is not None and node.overwrites:
        victims = dict.fromkeys(node.inputs[k].value for k in node.overwrites if _may_overwrite(tape, node, k, held))
        variants = tuple(
            Variant(name=f"{node.name}.inplace", inputs=inputs, outputs=outputs, inplace_of=((outputs[0], tensor_of[v]),)) for v in victims
        )
    return Op(id=id, name=node.name, inputs=inputs, outputs=outputs, variants=variants, where=node.where)


def _may_overwrite(tape: Tape, node: Node, k: int, held: set[int]) -> bool:
    """The input is all of a value that nobody holds, and every other look at that value sees it the same way."""
    victim, spec = node.inputs[k], node.outputs[0].view.spec
    whole = tape.values[victim.value].spec
    return (
        victim.value not in held
        and victim.view.is_rows
        and victim.view.offset == 0
        and victim.shape == spec.shape
        and (whole.nbytes, victim.dtype) == (spec.nbytes, spec.dtype)
        and all(x.view == victim.view for x in node.inputs if x.value == victim.value)
    )


def _call(node: Node, tensor_of: dict[int, int]) -> Call:
    assert node.kernel is not None
    return Call(
        kernel=node.kernel,
        inputs=tuple((tensor_of[x.value], x.view) for x in node.inputs),
        outputs=tuple((tensor_of[x.value], x.view) for x in node.outputs),
        scratch=node.scratch,
    )


def _rough_costs(graph: Graph, nodes: Sequence[Node], calls: Sequence[Call]) -> Costs:
    times = []
    for node, op in zip(nodes, graph.ops, strict=True):
        moved = sum(graph.size_of(t) for t in (*op.inputs, *op.outputs))
        times.append(_CALL_NS + round(max(node.flops / _FLOPS_PER_NS, moved / _BYTES_PER_NS)))
    scratch = [call.scratch_bytes for call in calls]
    return Costs(
        op_time_ns=tuple(times),
        workspace_bytes=tuple(scratch),
        variant_time_ns=tuple((t,) * len(op.variants) for t, op in zip(times, graph.ops, strict=True)),
        variant_workspace_bytes=tuple((s,) * len(op.variants) for s, op in zip(scratch, graph.ops, strict=True)),
        device="numpy, estimated",
        graph_digest=graph.digest,
    )
