"""Random graphs, costs and schedules for every test: one generator, two doors.

    random_graph(rng), random_training_graph(rng), random_costs(rng, graph), random_schedule(rng, graph, costs),
    mutated_schedule(rng, graph, costs, schedule)                  plain `random.Random`: for loops over 10,000 seeds
    graphs(), training_graphs(), cases(), illegal_cases()   the same through Hypothesis, which shrinks what fails

Every generated graph can be run: all ops once, as written and in order, is a legal schedule. That is what the captured
graphs promise too, and what a generator of legal schedules can fall back on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from memfit.core.costs import Costs, Level
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step

_INNER_KINDS = (Kind.ACTIVATION, Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY, Kind.BUFFER)
_SOURCE_KINDS = (Kind.PARAMETER, Kind.INPUT, Kind.OPTIMIZER, Kind.BUFFER)


class Case(NamedTuple):
    """A graph, what it costs, and a schedule to judge on it."""

    graph: Graph
    costs: Costs
    schedule: Schedule


# -- graphs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a random graph may contain. `alternatives` are fused ops that make an existing tensor another way."""

    min_ops: int = 1
    max_ops: int = 8
    max_size_bytes: int = 64
    views: bool = True
    multi_output: bool = True
    inplace: bool = True
    variants: bool = True
    once_only: bool = True
    seeded: bool = True
    zero_sizes: bool = True
    alternatives: bool = False
    dead_values: bool = True


PLAIN = Shape(
    views=False, multi_output=False, inplace=False, variants=False, once_only=False, seeded=False, zero_sizes=False, dead_values=False
)
"""Ops with one output each and nothing else: what the textbook algorithms are about."""

FULL = Shape(alternatives=True)


@dataclass(slots=True)
class _Draft:
    """A graph being drawn. `readable` is what an op as written may read, `extra` what only variants provide."""

    rng: Random
    shape: Shape
    storages: list[Storage] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    readable: list[int] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)

    def chance(self, allowed: bool, probability: float) -> bool:
        return allowed and self.rng.random() < probability

    def size(self) -> int:
        return 0 if self.chance(self.shape.zero_sizes, 0.08) else self.rng.randint(1, self.shape.max_size_bytes)

    def new_tensor(self, kind: Kind, size_bytes: int) -> int:
        self.storages.append(Storage(id=len(self.storages), size_bytes=size_bytes, kind=kind))
        return self.new_view(len(self.storages) - 1)

    def new_view(self, storage: int) -> int:
        self.tensors.append(Tensor(id=len(self.tensors), storage=storage))
        return len(self.tensors) - 1

    def storage_of(self, tensor: int) -> int:
        return self.tensors[tensor].storage

    def size_of(self, tensor: int) -> int:
        return self.storages[self.storage_of(tensor)].size_bytes

    def pick_inputs(self, pool: list[int], most: int) -> tuple[int, ...]:
        """Mostly recent tensors, so that graphs are deep as well as wide."""
        recent = pool[-4:] if self.rng.random() < 0.7 else pool
        return tuple(self.rng.sample(recent, min(len(recent), self.rng.randint(1, most))))


def random_graph(rng: Random, shape: Shape = Shape()) -> Graph:
    """A valid graph of `shape`, topological and runnable as written."""
    draft = _Draft(rng, shape)
    for _ in range(rng.randint(1, 3)):
        draft.readable.append(draft.new_tensor(rng.choice(_SOURCE_KINDS), draft.size()))
    if draft.chance(shape.views, 0.2):
        draft.readable.append(draft.new_view(draft.storage_of(draft.readable[0])))
    sources = tuple(draft.readable)
    for _ in range(rng.randint(shape.min_ops, shape.max_ops)):
        _add_op(draft)
    return Graph(
        ops=tuple(draft.ops),
        tensors=tuple(draft.tensors),
        storages=tuple(draft.storages),
        sources=sources,
        results=_pick_results(draft, sources),
    )


def _add_op(draft: _Draft) -> None:
    rng, shape = draft.rng, draft.shape
    inputs = () if draft.chance(True, 0.03) else draft.pick_inputs(draft.readable, 3)
    made = [t for op in draft.ops for t in op.outputs if t in draft.readable and t not in inputs]
    if made and draft.chance(shape.alternatives, 0.1):  # the same value another way, by an op of its own
        known = rng.choice(made)
        inputs = tuple(t for t in inputs if draft.storage_of(t) != draft.storage_of(known))
        draft.ops.append(Op(id=len(draft.ops), name="fused", inputs=inputs, outputs=(known,), replayable=rng.random() < 0.9))
        draft.read.update(inputs)
        return
    inplace = _pick_inplace(draft, inputs) if draft.chance(shape.inplace, 0.25) else ()
    outputs = [new for new, _ in inplace]
    overwritten = {draft.storage_of(old) for _, old in inplace}
    kept = [t for t in inputs if draft.storage_of(t) not in overwritten]
    if kept and draft.chance(shape.views, 0.15):
        outputs.append(draft.new_view(draft.storage_of(rng.choice(kept))))
    num_fresh = rng.randint(1, 2) if draft.chance(shape.multi_output, 0.3) else int(not outputs)
    for _ in range(num_fresh):
        size = draft.size_of(rng.choice(inputs)) if inputs and rng.random() < 0.4 else draft.size()
        outputs.append(draft.new_tensor(rng.choice(_INNER_KINDS), size))
        if draft.chance(shape.views, 0.1):
            outputs.append(draft.new_view(len(draft.storages) - 1))
    variants = tuple(_variant(draft, outputs) for _ in range(rng.randint(1, 2))) if draft.chance(shape.variants, 0.3) else ()
    draft.readable = [t for t in draft.readable if draft.storage_of(t) not in overwritten] + outputs
    draft.extra += [t for v in variants for t in v.outputs if t not in outputs]  # later variants may read them
    draft.read.update(inputs)
    draft.ops.append(
        Op(
            id=len(draft.ops),
            name=rng.choice(("mm", "relu", "view", "add")),
            inputs=inputs,
            outputs=tuple(outputs),
            replayable=not draft.chance(shape.once_only, 0.1),
            seeded=draft.chance(shape.seeded, 0.2),
            inplace_of=inplace,
            variants=variants,
            where=rng.choice(("", "layers.0")),
        )
    )


def _pick_inplace(draft: _Draft, inputs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Overwrite one input with a new storage of the same size; nobody reads the old one as written afterwards."""
    if not inputs:
        return ()
    old = draft.rng.choice(inputs)
    draft.read.update(t.id for t in draft.tensors if t.storage == draft.storage_of(old))  # gone: no result either
    return ((draft.new_tensor(draft.rng.choice(_INNER_KINDS), draft.size_of(old)), old),)


def _variant(draft: _Draft, outputs: list[int]) -> Variant:
    """Other inputs, some of the outputs, perhaps a mask of its own that later variants may read, perhaps in place."""
    rng = draft.rng
    own = {draft.storage_of(t) for t in outputs}
    pool = [t for t in draft.readable + draft.extra if draft.storage_of(t) not in own]
    inputs = draft.pick_inputs(pool, 3) if pool else ()
    made = list(outputs) if rng.random() < 0.7 else rng.sample(outputs, rng.randint(1, len(outputs)))
    inplace: tuple[tuple[int, int], ...] = ()
    if draft.chance(draft.shape.inplace, 0.4):
        pairs = [(new, old) for new in made for old in inputs if draft.size_of(new) == draft.size_of(old)]
        inplace = (rng.choice(pairs),) if pairs else ()
    if rng.random() < 0.3:
        made.append(draft.new_tensor(Kind.ACTIVATION, draft.size()))
    return Variant(name="other", inputs=inputs, outputs=tuple(made), inplace_of=inplace)


def _pick_results(draft: _Draft, sources: tuple[int, ...]) -> tuple[int, ...]:
    rng = draft.rng
    unread = [t for t in draft.readable if t not in draft.read and t not in sources]
    results = [t for t in unread if not draft.chance(draft.shape.dead_values, 0.15)]
    results += [t for t in sources if t in draft.readable and rng.random() < 0.5]
    results += [t for t in draft.readable if t not in results and rng.random() < 0.05]
    return tuple(results)


def random_training_graph(rng: Random, *, max_layers: int = 4, max_size_bytes: int = 64, skips: bool = True) -> Graph:
    """A chain of layers, its loss and its backward, with skip connections: the shape rematerialization is about.

    Forward i reads activation i (and perhaps an older one); backward i reads the gradient coming in and, depending on
    the layer, its input, its output or both.
    """
    draft = _Draft(rng, PLAIN)
    layers = rng.randint(1, max_layers)
    size = lambda: rng.randint(1, max_size_bytes)  # noqa: E731
    weights = [draft.new_tensor(Kind.PARAMETER, size()) for _ in range(layers)]
    acts = [draft.new_tensor(Kind.INPUT, size())]
    sources = (*weights, acts[0])
    for i in range(layers):
        older = (rng.choice(acts[:-1]),) if skips and len(acts) > 1 and rng.random() < 0.3 else ()
        acts.append(draft.new_tensor(Kind.ACTIVATION, size()))
        draft.ops.append(Op(id=i, name=f"forward{i}", inputs=(weights[i], acts[i], *older), outputs=(acts[-1],)))
    loss = draft.new_tensor(Kind.ACTIVATION, 1)
    draft.ops.append(Op(id=layers, name="loss", inputs=(acts[-1],), outputs=(loss,)))
    incoming, gradients = loss, []
    for i in reversed(range(layers)):
        saved = rng.choice(((acts[i],), (acts[i + 1],), (acts[i], acts[i + 1])))
        gradients.append(draft.new_tensor(Kind.GRADIENT, draft.size_of(weights[i])))
        outputs = [gradients[-1]]
        if i:
            outputs.append(draft.new_tensor(Kind.TEMPORARY, draft.size_of(acts[i])))
        op = Op(id=len(draft.ops), name=f"backward{i}", inputs=(weights[i], incoming, *saved), outputs=tuple(outputs))
        draft.ops.append(op)
        incoming = outputs[-1]
    return Graph(
        ops=tuple(draft.ops),
        tensors=tuple(draft.tensors),
        storages=tuple(draft.storages),
        sources=sources,
        results=(*sources, loss, *gradients),
    )


# -- costs ---------------------------------------------------------------------------------------------------------


def random_costs(rng: Random, graph: Graph, *, max_levels: int = 2, max_time_ns: int = 50, max_workspace_bytes: int = 30) -> Costs:
    """Times, workspaces (half of them 0) and up to `max_levels` levels below the device."""

    def workspace() -> int:
        return rng.randint(1, max_workspace_bytes) if max_workspace_bytes and rng.random() < 0.5 else 0

    levels = tuple(
        Level(
            write_bytes_per_s=rng.choice((0.0, 1e9, 3.3e8)),
            read_bytes_per_s=rng.choice((0.0, 2e9, 7.7e8)),
            write_latency_ns=rng.randint(0, 20),
            read_latency_ns=rng.randint(0, 20),
        )
        for _ in range(rng.randint(0, max_levels))
    )
    return Costs(
        op_time_ns=tuple(rng.randint(0, max_time_ns) for _ in graph.ops),
        workspace_bytes=tuple(workspace() for _ in graph.ops),
        variant_time_ns=tuple(tuple(rng.randint(0, max_time_ns) for _ in op.variants) for op in graph.ops),
        variant_workspace_bytes=tuple(tuple(workspace() for _ in op.variants) for op in graph.ops),
        levels=levels,
        graph_digest=rng.choice(("", graph.digest)),
    )


# -- schedules -----------------------------------------------------------------------------------------------------


def plain_schedule(graph: Graph) -> Schedule:
    """Every op once, as written, nothing freed: legal on every generated graph."""
    return Schedule(steps=tuple(Compute(op.id) for op in graph.ops))


class _Stuck(Exception):
    """A random walk threw away what it cannot make again."""


@dataclass(slots=True)
class _Walk:
    """A random legal walk: what is present, so that only legal steps are drawn."""

    rng: Random
    graph: Graph
    num_levels: int
    steps: list[Step] = field(default_factory=list)
    present: set[int] = field(default_factory=set)  # tensors readable on the device
    resident: set[int] = field(default_factory=set)  # storages on the device
    copies: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)  # (storage, level) -> tensors saved
    ran: set[int] = field(default_factory=set)
    last_draw: int = -1

    def views(self, storage: int) -> set[int]:
        return {t for t in self.present if self.graph.storage_of(t) == storage}

    def may_compute(self, op: int, variant: int) -> bool:
        written = self.graph.ops[op]
        in_turn = written.replayable if op in self.ran else not written.seeded or op > self.last_draw
        return in_turn and self.present.issuperset(written.form(variant).inputs)

    def compute(self, op: int, variant: int) -> None:
        form, storage_of = self.graph.ops[op].form(variant), self.graph.storage_of
        inputs = {storage_of(t) for t in form.inputs}
        before = set(self.resident)
        for _, old in form.inplace_of:
            self._forget(storage_of(old))
        for t in form.outputs:
            if storage_of(t) in inputs or storage_of(t) not in before:
                self.resident.add(storage_of(t))
                self.present.add(t)
        if self.graph.ops[op].seeded and op not in self.ran:
            self.last_draw = op
        self.ran.add(op)
        self.steps.append(Compute(op, variant))

    def free(self, storage: int, level: int = 0) -> None:
        if level == 0:
            self._forget(storage)
        else:
            del self.copies[storage, level]
        self.steps.append(Free(storage, level))

    def offload(self, storage: int, level: int) -> None:
        self.copies[storage, level] = frozenset(self.views(storage))
        self.steps.append(Offload(storage, level))

    def reload(self, storage: int, level: int) -> None:
        self.resident.add(storage)
        self.present |= self.copies[storage, level]
        self.steps.append(Reload(storage, level))

    def _forget(self, storage: int) -> None:
        self.present -= self.views(storage)
        self.resident.discard(storage)

    def wander(self, num_steps: int, destruction: float) -> None:
        """Random legal steps; `destruction` is how often something is thrown away."""
        rng, levels = self.rng, range(1, self.num_levels + 1)
        for _ in range(num_steps):
            if rng.random() < destruction:
                victims = [(s, 0) for s in sorted(self.resident)] + sorted(self.copies)
                if victims:
                    self.free(*rng.choice(victims))
                continue
            moves: list[tuple[object, tuple[int, int]]] = [
                (self.compute, (op.id, v))
                for op in self.graph.ops
                for v in range(len(op.forms))
                if self.may_compute(op.id, v) and (op.id not in self.ran or rng.random() < 0.3)
            ]
            if rng.random() < 0.4 or not moves:
                moves += [(self.offload, (s, k)) for s in sorted(self.resident) for k in levels if (s, k) not in self.copies]
                moves += [(self.reload, key) for key in sorted(self.copies) if key[0] not in self.resident]
            if moves:
                move, arguments = rng.choice(moves)
                move(*arguments)  # type: ignore[operator]

    def make(self, tensor: int, busy: frozenset[int] = frozenset()) -> None:
        """Bring a tensor back, by reloading it or by running the ops it needs, or raise _Stuck."""
        if tensor in self.present:
            return
        storage = self.graph.storage_of(tensor)
        for (kept, level), saved in sorted(self.copies.items()):
            if kept == storage and tensor in saved:
                if storage in self.resident:
                    self.free(storage)
                self.reload(storage, level)
                return
        for op in self.graph.producers[tensor]:
            if op in busy or (op in self.ran and not self.graph.ops[op].replayable) or tensor not in self.graph.ops[op].outputs:
                continue
            for needed in self.graph.ops[op].inputs:
                self.make(needed, busy | {op})
            if not self.may_compute(op, 0):
                continue
            if storage in self.resident and not self.graph.is_view(self.graph.ops[op], tensor):
                self.free(storage)  # there, but without this view: make it anew
            self.compute(op, 0)
            if tensor in self.present:
                return
        raise _Stuck

    def finish(self) -> None:
        for _ in range(3):  # making one result in place may undo another
            for tensor in self.graph.results:
                self.make(tensor)
            if self.present.issuperset(self.graph.results):
                return
        raise _Stuck


def random_schedule(rng: Random, graph: Graph, costs: Costs, *, max_steps: int = 30) -> Schedule:
    """A legal schedule (no budget): any order, recomputation, variants, frees, offloads and reloads."""
    for destruction in (0.25, 0.15, 0.05, 0.0):
        walk = _Walk(rng, graph, len(costs.levels))
        walk.present.update(graph.sources)
        walk.resident.update(graph.storage_of(t) for t in graph.sources)
        walk.wander(rng.randint(0, max_steps), destruction)
        try:
            walk.finish()
        except _Stuck:
            continue
        return Schedule(steps=tuple(walk.steps))
    return plain_schedule(graph)


def mutated_schedule(rng: Random, graph: Graph, costs: Costs, schedule: Schedule, *, num_mutations: int = 1) -> Schedule:
    """The schedule after a few random edits: usually illegal, sometimes by luck still legal."""
    steps = list(schedule.steps)
    for _ in range(num_mutations):
        at = rng.randint(0, len(steps))
        edit = rng.choice(("insert", "insert", "delete", "swap", "repeat", "truncate", "replace"))
        if edit == "insert" or not steps:
            steps.insert(at, _any_step(rng, graph, len(costs.levels)))
            continue
        at = min(at, len(steps) - 1)
        if edit == "delete":
            del steps[at]
        elif edit == "swap":
            other = rng.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        elif edit == "repeat":
            steps.insert(rng.randint(0, len(steps)), steps[at])
        elif edit == "truncate":
            del steps[at:]
        else:
            steps[at] = _any_step(rng, graph, len(costs.levels))
    return Schedule(steps=tuple(steps))


def _any_step(rng: Random, graph: Graph, num_levels: int) -> Step:
    """Any step at all, now and then with ids that do not exist."""
    outside = rng.random() < 0.1
    op = rng.randint(-1, len(graph.ops)) if outside or not graph.ops else rng.randrange(len(graph.ops))
    storage = rng.randint(-1, len(graph.storages)) if outside or not graph.storages else rng.randrange(len(graph.storages))
    level = rng.choice((-1, 0, 1, 2, 3)) if outside else rng.randint(0, num_levels)
    kind = rng.choice((Compute, Free, Offload, Reload) if num_levels or outside else (Compute, Free))
    if kind is Compute:
        return Compute(op, rng.choice((0, 0, 0, 1, 2, -1)) if outside else rng.choice((0, 0, 1)))
    return kind(storage, level)


def random_case(rng: Random, shape: Shape = FULL, *, max_steps: int = 30) -> Case:
    """A legal case."""
    graph = random_graph(rng, shape) if rng.random() < 0.85 else random_training_graph(rng)
    costs = random_costs(rng, graph)
    return Case(graph, costs, random_schedule(rng, graph, costs, max_steps=max_steps))


def random_illegal_case(rng: Random, shape: Shape = FULL) -> Case:
    """A case after one to three random edits: nearly always illegal."""
    graph, costs, schedule = random_case(rng, shape)
    return Case(graph, costs, mutated_schedule(rng, graph, costs, schedule, num_mutations=rng.randint(1, 3)))


# -- the same through Hypothesis -----------------------------------------------------------------------------------

_RNG = st.randoms(use_true_random=False)


def graphs(shape: Shape = Shape()) -> st.SearchStrategy[Graph]:
    return _RNG.map(lambda rng: random_graph(rng, shape))


def training_graphs(max_layers: int = 4) -> st.SearchStrategy[Graph]:
    return _RNG.map(lambda rng: random_training_graph(rng, max_layers=max_layers))


def cases(shape: Shape = FULL) -> st.SearchStrategy[Case]:
    """Legal (graph, costs, schedule) triples."""
    return _RNG.map(lambda rng: random_case(rng, shape))


def illegal_cases(shape: Shape = FULL) -> st.SearchStrategy[Case]:
    return _RNG.map(lambda rng: random_illegal_case(rng, shape))


def costed_graphs(shape: Shape = Shape(), *, max_levels: int = 2, max_workspace_bytes: int = 30) -> st.SearchStrategy[tuple[Graph, Costs]]:
    """A graph with its costs: what a planner is given."""

    def draw(rng: Random) -> tuple[Graph, Costs]:
        graph = random_graph(rng, shape)
        return graph, random_costs(rng, graph, max_levels=max_levels, max_workspace_bytes=max_workspace_bytes)

    return _RNG.map(draw)
