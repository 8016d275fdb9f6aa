"""A Python function captured ahead of time by Dynamo: graph, guards, bytecode and side effects. Nothing of the user's is run.

function, locals ──> symbolic run ──> graph      what is computed, every tensor from outside an input
                                  ├─> guards     a check in C++ of all that the run read: values, types, hooks, flags
                                  ├─> bytecode   the Python around the graph: outputs of any class, counters, lists, attributes
                                  └─> effects    the names of the Python objects that the function writes to
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_private.grouped_products import trace_grouped_products
from memfit.torch_private.probe import Symbol, at_least, is_tested

_NEED = "guard what a step depends on"
_COMPILE = Symbol("torch._dynamo.convert_frame.compile_frame", _NEED)
_COMPILE_ID = Symbol("torch._dynamo.convert_frame.get_compile_id", _NEED)
_CONTEXT = Symbol("torch._guards.CompileContext", _NEED)
_IN_CONTEXT = Symbol("torch._guards.compile_context", _NEED)
_METRICS = Symbol("torch._dynamo.utils.get_metrics_context", _NEED)
_TIMED = Symbol("torch._dynamo.utils.dynamo_timed", _NEED)
_MODES = Symbol("torch._dynamo.variables.torch_function.torch_function_mode_stack_state_mgr", _NEED)
_TRANSLATOR = Symbol("torch._dynamo.symbolic_convert.InstructionTranslator", _NEED)
_NEW_ATTRIBUTES = Symbol("torch._dynamo.variables.base.AttributeMutationNew", _NEED)
_NEW_VALUE = Symbol("torch._dynamo.variables.base.ValueMutationNew", _NEED)
_CONFIG = Symbol("torch._dynamo.config", _NEED)
_REFUSAL = Symbol("torch._dynamo.exc.TorchDynamoException", _NEED)
_CALLBACKS = Symbol("torch._dynamo.callback.callback_handler", "say where torch.compile gave up", optional=True)
_COUNTERS = Symbol("torch._dynamo.utils.counters", "say where torch.compile gave up", optional=True)

Locals = Mapping[str, Any]
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


class NotCaptured(Exception):
    """Dynamo has no single graph for the function: a break, or something it does not support. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedFrame:
    """One way through a function. `sources[i]` is where the graph's input i comes from, in Python: "L['model']._parameters['weight']"."""

    graph: torch.fx.GraphModule
    sources: tuple[str, ...]
    effects: tuple[str, ...]
    codes: tuple[types.CodeType, ...]  # of the functions that were run symbolically
    zeros: tuple[str, ...]  # what was compared with a floating-point zero, whose sign a comparison does not see
    guards: Any
    bind: Callable[[Callable[..., Any]], Callable[..., Any]]  # the function again, with something else in the place of its graph

    def serves(self, local: Locals) -> bool:
        """Whether all that the capture depended on is as it was."""
        return bool(self.guards.check(local))

    def changes(self, local: Locals) -> list[str]:
        """What is other than it was, as conditions that no longer hold: "L['model'].scale == 1.0"."""
        parts = self.guards.check_verbose(local).verbose_code_parts
        return [str(part).split("#")[0].strip() for part in parts]


def guards_see_parameters() -> bool:
    """Whether guards notice a parameter that is frozen, or one that is another's: from torch 2.13 on (2.11 does not, 2.12 was not tried)."""
    return at_least((2, 13))


def capture_frame(function: types.FunctionType, local: Locals, *, fast_check: bool = False) -> CapturedFrame:
    """Run `function` symbolically on these locals. `fast_check`: the guards trust the versions of dictionaries below a module.

    The function's globals are a dictionary of its own each time: Dynamo writes aliases into them.
    """
    if not is_tested():
        raise NotCaptured("steps are captured by Dynamo on versions of torch that memfit is tested on")
    fresh = types.FunctionType(function.__code__, {"__builtins__": builtins, "__name__": function.__name__})
    held: dict[str, Any] = {}

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        held["graph"], held["output"] = graph, _TRANSLATOR().current_tx().output
        held["effects"] = _name_effects(held["output"])
        return graph

    try:
        with ExitStack() as stack:
            stack.enter_context(_CONFIG().patch(**_settings(fast_check)))
            stack.enter_context(trace_grouped_products())
            stack.enter_context(_METRICS()())
            stack.enter_context(_TIMED()("memfit"))
            stack.enter_context(_MODES())
            stack.enter_context(_IN_CONTEXT()(_CONTEXT()(_COMPILE_ID()({}))))
            made = _COMPILE()(
                fresh.__code__,
                fresh.__globals__,
                dict(local),
                builtins.__dict__,
                (),
                compiler_fn=keep,
                one_graph=True,
                restart_reasons=set(),
            )
            if "graph" not in held:
                raise NotCaptured("nothing is computed")
            return _put_together(made, held, local, fresh)
    except NotCaptured:
        raise
    except Exception as error:
        raise NotCaptured(f"{type(error).__name__}: {_first_line(error)}{_place_of(error)}") from error


def _put_together(made: Any, held: dict[str, Any], local: Locals, function: types.FunctionType) -> CapturedFrame:
    graph, output = held["graph"], made.tracer_output.output_graph
    zeros = _find_zeros(output, local, function)
    guards = made.build_guards(function.__code__).guard_manager
    environment = made.graph_capture_output().get_runtime_env()
    codes = tuple(output.traced_code)
    sources = tuple(_source_name(node) for node in graph.graph.nodes if node.op == "placeholder")
    identity = graph.meta["backend_id"]

    def bind(compiled: Callable[..., Any]) -> Callable[..., Any]:
        names = {**_builtins_of(environment), **function.__globals__}
        try:
            call: Callable[..., Any] = environment.forward_callable(identity, compiled, extra_globals=names)
        except RuntimeError as error:
            raise NotCaptured(f"{type(error).__name__}: {_first_line(error)}") from error
        return call

    return CapturedFrame(graph=graph, sources=sources, effects=held["effects"], codes=codes, zeros=zeros, guards=guards, bind=bind)


def _builtins_of(environment: Any) -> dict[str, Any]:
    """Functions of Python's own that the bytecode calls: torch 2.11 counts them as names that somebody has to give."""
    return {n: getattr(builtins, n) for n in environment.external_refs if hasattr(builtins, n) and n not in environment.used_globals}


def _settings(fast_check: bool) -> dict[str, Any]:
    return {
        "skip_nnmodule_hook_guards": False,
        "skip_no_tensor_aliasing_guards_on_parameters": False,
        "specialize_float": True,
        "specialize_int": True,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "allow_rnn": True,
        "use_recursive_dict_tags_for_guards": fast_check,
        "ignore_logging_functions": _find_logging(),
    }


def _find_logging() -> set[Any]:
    """What only tells the user something: left out while the step is run symbolically."""
    names = ("debug", "info", "warning", "error", "log", "warning_once", "info_once", "warning_advice")
    return {warnings.warn, *(getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name))}


def _name_effects(output: Any) -> tuple[str, ...]:
    """Python objects from before the function that it writes to. Tensors changed in place are in the graph."""
    effects, found = output.side_effects, []
    for variable in effects._get_modified_vars():
        kind = getattr(variable, "mutation_type", None)
        if isinstance(kind, (_NEW_ATTRIBUTES(), _NEW_VALUE())):
            continue
        source = getattr(variable, "source", None) or getattr(kind, "source", None)
        name = _name_of(source) if source is not None else type(variable).__name__
        attributes = list(effects.store_attr_mutations.get(variable, ()))
        if attributes and type(variable).__name__ == "TensorVariable":
            continue
        found += [f"{name}.{attribute}" for attribute in attributes] or [name]
    return (*found, *(["random"] if output.random_calls else []))


def _find_zeros(output: Any, local: Locals, function: types.FunctionType) -> tuple[str, ...]:
    """Of what is guarded by its value, what is a floating-point zero now."""
    found = []
    for guard in output.guards:
        if guard.create_fn_name() not in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            continue
        try:
            value = eval(guard.name, {"L": local, "G": function.__globals__, **function.__globals__})
        except Exception:  # a name that is no expression over the locals
            continue
        if type(value) is float and value == 0 and guard.name.startswith("L["):
            found.append(guard.name)
    return tuple(found)


def _source_name(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    return _name_of(source) if source is not None else node.name


def _name_of(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:160] if text else "no message"


def _place_of(error: Exception) -> str:
    """The line of the user's at which Dynamo stopped."""
    stack = getattr(error, "real_stack", None) or ()
    inner = next((f for f in reversed(stack) if not f.filename.startswith(_OWN_FOLDER)), None)
    return f" ({os.path.basename(inner.filename)}:{inner.lineno})" if inner is not None else ""


def on_skipped_loop(backend: Callable[..., Any], tell: Callable[[str], None]) -> None:
    """Call `tell` with the place of a function that torch.compile leaves to eager, backend and all, because of a graph break inside a loop."""
    handler, counters = _CALLBACKS(), _COUNTERS()
    known: set[str] = set()
    if handler is None or counters is None:
        return

    def look(_: Any) -> None:
        for text in counters["unimplemented"]:
            if text not in known and _LOOP in text:
                known.add(text)
                if _is_compiling_for(backend):
                    place = text.partition("frame skipped: ")[2].partition("\n")[0]
                    tell(place.strip())

    handler.register_end_callback(look)


_LOOP = "graph break in loop"


def _is_compiling_for(backend: Callable[..., Any]) -> bool:
    """Whether the compilation that this is called from has this backend."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        owner = getattr(frame.f_locals.get("self"), "_torchdynamo_orig_backend", None)
        while owner is not None:
            if owner is backend:
                return True
            owner = getattr(owner, "compiler_fn", None) or getattr(owner, "_torchdynamo_orig_backend", None)
        frame = frame.f_back
    return False
