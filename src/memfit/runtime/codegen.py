"""A schedule as straight-line Python: one line per op, one `del` per Free, split where backward begins.

    def forward(s, rng, host, old):                   def backward(saved, tangents, put, rng, host):
        s0, s1, s2 = s                                 v3, s1 = saved
        v3 = f0(s2, s0, s1)                            saved.clear()
        v4 = f1(v3)                                    v9 = f2(tangents[0], v3)
        del v3                                         put(1, v9, True)
        return [v4], [], [...]                         return None

A tuple is unpacked at once and dropped, since it would pin every output. A replayed random op draws from the state that the
generator had the first time. Locals are the only references, so `del` frees; what is being copied to the host waits for that copy, and
a reader of what comes back for that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from memfit.capture.captured import Captured, OpCall, Ref, Role
from memfit.core.costs import HOST, level_name
from memfit.core.errors import Unsupported
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule
from memfit.torch_private.tensors import direct_call

Lay = Callable[[int, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Compiled code for one schedule. `backward` is None for an inference.

    `saved` says what forward hands to backward: positions of sources, None for what the step made. `reached_from[i]` are the
    tangents that the gradient of source i is made of.
    """

    forward: Callable[..., tuple[list[Any], list[Any], list[Any]]]
    backward: Callable[..., None] | None
    source: str
    saved: tuple[int | None, ...] = ()
    reached_from: Mapping[int, frozenset[int]] = field(default_factory=dict)


_SMALL = 8
"""Numbers up to here are written as they are; larger ones are mostly sizes and get a name, so that the text is the same for other sizes."""


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """The text of a plan, compiled once for all sizes at which it is the same."""
    return compile(source, "<memfit plan>", "exec")


def generate(captured: Captured, schedule: Schedule, lay: Lay | None = None, only: Collection[int] | None = None) -> Program:
    """`lay(t, made)` gives each tensor that an op has made in the layout that was traced, or those of `only`."""
    return _Writer(captured, schedule, lay, only).program()


def view_in_copy(view: torch.Tensor, base: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The same part of a copy that `view` is of `base`."""
    if view.dtype == base.dtype and copy.stride() == base.stride():
        return copy.as_strided(view.shape, view.stride(), copy.storage_offset() + view.storage_offset() - base.storage_offset())
    return view.clone()


class _Writer:
    def __init__(self, captured: Captured, schedule: Schedule, lay: Lay | None, only: Collection[int] | None) -> None:
        self.captured, self.schedule = captured, schedule
        self.graph = captured.graph
        self.only = range(len(self.graph.tensors)) if only is None else only
        self.globals: dict[str, Any] = {} if lay is None else {"lay": lay}
        self.known: dict[Any, str] = {}  # id of a constant, or a number -> its global name
        self.lines: list[str] = []
        self.names: dict[int, str] = {}  # tensor -> variable that holds it now
        self.held: dict[int, set[int]] = {}  # storage -> tensors with a variable
        self.replayed = self._find_replayed_draws()
        self.drawn: set[int] = set()
        self.leaving: set[int] = set()  # storages whose copy to the host may be under way
        self.arriving: set[int] = set()
        self.on_host: dict[int, list[int]] = {}  # storage -> tensors that come back with it
        self.in_backward = False
        self.used_in_backward = self._find_used_in_backward()

    def program(self) -> Program:
        for position, tensor in enumerate(self.captured.convention.sources):
            self._bind(tensor, f"s{position}")
        forward: list[str] = []
        for step in self.schedule.steps:
            if isinstance(step, Compute):
                if self.captured.calls[step.op].role is Role.BACKWARD_BEGINS:
                    self._leave_forward()
                    forward, self.lines = self.lines, []
                    self._enter_backward()
                else:
                    self._compute(step)
            elif step.level > HOST:
                raise Unsupported(
                    f"the engine cannot run {step}: copies go to the host, not to the {level_name(step.level)}; plan with one level."
                )
            elif isinstance(step, Offload):
                self._send(step.storage)
            elif isinstance(step, Reload):
                self._fetch(step.storage)
            elif step.level:
                self.lines.append(f"host.drop({step.storage})")
            else:
                self._free(step.storage)
        if not self.in_backward:
            self._leave_forward()
            forward, self.lines = self.lines, []
        return self._compile(forward, self.lines if self.in_backward else None)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _compute(self, step: Compute) -> None:
        call = self.captured.call(step.op, step.variant)
        if self.arriving:
            self._wait_arrived({self.graph.storage_of(t) for t in self.graph.ops[step.op].form(step.variant).inputs})
        if call.role is Role.ACCUMULATE:
            self._accumulate(call)
        elif call.role is Role.CALL:
            overwritten = [self.graph.storage_of(old) for _, old in self.graph.ops[step.op].form(step.variant).inplace_of]
            self._wait_sent(overwritten)
            self._call(step.op, call)
            for storage in overwritten:
                self._free(storage)  # its bytes have a new name now

    def _call(self, op: int, call: OpCall) -> None:
        arguments = [self._render(a) for a in call.args] + [f"{k}={self._render(v)}" for k, v in call.kwargs.items()]
        if self.graph.ops[op].seeded and op in self.replayed:
            verb = "redraw" if op in self.drawn else "draw"
            self.drawn.add(op)
            self._assign(call, f"rng.{verb}({', '.join([str(op), self._constant(call.target, 'f'), *arguments])})")
        else:
            self._assign(call, f"{self._constant(direct_call(call.target), 'f')}({', '.join(arguments)})")

    def _assign(self, call: OpCall, text: str) -> None:
        inputs = {self.graph.storage_of(r.tensor) for r in _find_refs((call.args, call.kwargs))}
        wanted = [
            (k, t) for k, t in enumerate(call.outputs) if t is not None and (self.graph.storage_of(t) in inputs or not self._is_held(t))
        ]
        if not call.unpack:
            if wanted:
                self.lines.append(f"v{wanted[0][1]} = {text}")
                self._bind(wanted[0][1], f"v{wanted[0][1]}")
                self._lay(wanted[0][1], inputs)
            else:
                self.lines.append(text)
            return
        self.lines.append(f"t = {text}")
        for k, tensor in wanted:
            self.lines.append(f"v{tensor} = t[{k}]")
            self._bind(tensor, f"v{tensor}")
        self.lines.append("del t")
        for _, tensor in wanted:
            self._lay(tensor, inputs)

    def _lay(self, tensor: int, inputs: set[int]) -> None:
        """A view lies as what it is a view of."""
        if "lay" in self.globals and tensor in self.only and self.graph.storage_of(tensor) not in inputs:
            self.lines.append(f"v{tensor} = lay({tensor}, v{tensor})")

    def _accumulate(self, call: OpCall) -> None:
        self.lines.append(f"put({call.index}, {self.names[call.args[0].tensor]}, {call.keeps})")

    def _send(self, storage: int) -> None:
        self._wait_arrived({storage})
        self.on_host[storage] = sorted(self.held[storage])
        self.lines.append(f"host.send({storage}, {', '.join(self.names[t] for t in self.on_host[storage])})")
        self.leaving.add(storage)

    def _fetch(self, storage: int) -> None:
        names = [f"v{t}" for t in self.on_host[storage]]
        self.lines.append(f"{', '.join(names)} = host.fetch({storage})")
        for tensor, name in zip(self.on_host[storage], names, strict=True):
            self._bind(tensor, name)
        self.arriving.add(storage)

    def _wait_arrived(self, storages: set[int]) -> None:
        self.lines += [f"host.wait_arrived({storage})" for storage in sorted(storages & self.arriving)]
        self.arriving -= storages

    def _wait_sent(self, storages: Iterable[int]) -> None:
        self.lines += [f"host.wait_sent({storage})" for storage in storages if storage in self.leaving]
        self.leaving.difference_update(storages)

    def _free(self, storage: int) -> None:
        self._wait_arrived({storage})
        self._wait_sent([storage])
        names = [self.names.pop(t, "") for t in sorted(self.held.pop(storage, set()))]  # "" did not cross the border
        own = [n for n in names if n.startswith("v")]
        if own:
            self.lines.append(f"del {', '.join(own)}")

    # -- the border between forward and backward ---------------------------------------------------------------------

    def _leave_forward(self) -> None:
        convention = self.captured.convention
        outputs = ", ".join(self.names[o.tensor] for o in convention.outputs if isinstance(o, Ref))
        mutations = ", ".join(self.names[t] for _, t in convention.mutations)
        self.saved = sorted({n for n in self.names.values() if n in self.used_in_backward})
        returned = {self.names[o.tensor] for o in convention.outputs if isinstance(o, Ref)}
        # an output that backward needs is saved as an alias: the output itself will carry grad_fn, and so a cycle
        before = self._render_old_values()
        saved = ", ".join(before.get(n) or (f"{n}.detach()" if n in returned else n) for n in self.saved)
        self.lines.append(f"return [{outputs}], [{mutations}], [{saved}]")

    def _render_old_values(self) -> dict[str, str]:
        """What is saved of buffers that forward is about to change, views of them too, is saved as it is now: in the copy that the step
        keeps anyway, if it has one."""
        changing = {self.graph.storage_of(self.captured.convention.sources[i]): i for i in self.captured.rereads}
        storages = {name: self.graph.storage_of(tensor) for tensor, name in self.names.items()}
        kept = {name: changing[storages[name]] for name in self.saved if storages[name] in changing}
        self.lines += [f"old{i} = s{i}.clone() if old is None else old[{i}]" for i in sorted(set(kept.values()))]
        return {
            name: f"old{i}" if name == f"s{i}" else f"{self._constant(view_in_copy, 'f')}({name}, s{i}, old{i})" for name, i in kept.items()
        }

    def _enter_backward(self) -> None:
        self.in_backward = True
        if self.saved:
            self.lines.append(f"{', '.join(self.saved)}{',' if len(self.saved) == 1 else ''} = saved")
        self.lines.append("saved.clear()")
        alive = set(self.saved)
        self.names = {t: n for t, n in self.names.items() if n in alive}
        for k, tensor in enumerate(self.captured.convention.tangents):
            self._bind(tensor, f"tangents[{k}]")

    def _find_used_in_backward(self) -> set[str]:
        """Variables read after the border and not made again before: found by walking the second half backwards."""
        steps = self.schedule.steps
        calls = self.captured.calls
        border = next((i for i, s in enumerate(steps) if isinstance(s, Compute) and calls[s.op].role is Role.BACKWARD_BEGINS), len(steps))
        sources = {t: f"s{i}" for i, t in enumerate(self.captured.convention.sources)}
        needed: set[int] = set()
        leaving = {s.storage for s in steps[:border] if isinstance(s, Offload)} - {s.storage for s in steps[:border] if isinstance(s, Free)}
        for step in reversed(steps[border + 1 :]):
            if isinstance(step, Compute):
                form = self.graph.ops[step.op].form(step.variant)
                needed -= set(form.outputs)
                needed |= set(form.inputs)
            elif isinstance(step, Reload):
                needed -= set(self.graph.tensors_of[step.storage])
            elif isinstance(step, Offload) or step.storage in leaving:  # what is copied must stay until it is
                needed |= set(self.graph.tensors_of[step.storage])
        return {sources.get(t, f"v{t}") for t in needed}

    # -- text ----------------------------------------------------------------------------------------------------

    def _compile(self, forward: list[str], backward: list[str] | None) -> Program:
        sources = ", ".join(f"s{i}" for i in range(len(self.captured.convention.sources)))
        text = [
            "def forward(s, rng, host=None, old=None):",
            f"    {sources}{',' if len(self.captured.convention.sources) == 1 else ''} = s" if sources else "    pass",
        ]
        text += [f"    {line}" for line in forward]
        if backward is not None:
            text += ["", "def backward(saved, tangents, put, rng, host=None):", *(f"    {line}" for line in backward)]
        source = "\n".join(text) + "\n"
        namespace = dict(self.globals)
        exec(_compiled(source), namespace)
        saved = tuple(int(n[1:]) if n.startswith("s") else None for n in self.saved)
        reached = find_reached(self.captured)
        return Program(forward=namespace["forward"], backward=namespace.get("backward"), source=source, saved=saved, reached_from=reached)

    def _render(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self.names[value.tensor]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self._render, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if type(value) is int and value > _SMALL:
            return self._constant(value, "n")
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._render(v)}" for k, v in value.items()) + "}"
        return self._constant(value, "k")

    def _constant(self, value: Any, prefix: str) -> str:
        key = (prefix, value) if type(value) is int else id(value)
        if key not in self.known:
            self.known[key] = f"{prefix}{len(self.known)}"
            self.globals[self.known[key]] = value
        return self.known[key]

    def _bind(self, tensor: int, name: str) -> None:
        self.names[tensor] = name
        self.held.setdefault(self.graph.storage_of(tensor), set()).add(tensor)

    def _is_held(self, tensor: int) -> bool:
        return self.graph.storage_of(tensor) in self.held

    def _find_replayed_draws(self) -> set[int]:
        seen: set[int] = set()
        again: set[int] = set()
        for step in self.schedule.steps:
            if isinstance(step, Compute) and self.graph.ops[step.op].seeded:
                (again if step.op in seen else seen).add(step.op)
        return again


def find_reached(captured: Captured) -> dict[int, frozenset[int]]:
    """Per source that gets a gradient, which of the outputs' gradients it is made of; all of them where that does not show."""
    graph, tangents = captured.graph, captured.convention.tangents
    reached = {t: frozenset([k]) for k, t in enumerate(tangents)}
    every, found = frozenset(range(len(tangents))), {}
    for op, call in zip(graph.ops, captured.calls, strict=True):
        parts = frozenset().union(*(reached.get(t, frozenset()) for t in op.inputs))
        if call.role is Role.ACCUMULATE:
            found[call.index] = parts or every
        elif call.role is Role.CALL and parts:
            reached.update(dict.fromkeys(op.outputs, parts))
    return found


def _find_refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _find_refs(inner)
    elif isinstance(value, Mapping):
        yield from _find_refs(list(value.values()))
