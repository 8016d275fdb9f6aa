"""Which module and which source line each op of a traced model comes from.

While the model is traced, a torch-function mode looks at the Python stack at every torch call and writes
"layers.11.mlp, model.py:42" into the meta that fx copies onto the nodes; backward nodes get it through the sequence
number they share with their forward op. The ops of a graph that Dynamo captured have no such stack: whoever runs the graph says
where each comes from (`placed_at`).
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.overrides import TorchFunctionMode

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = str(Path(__file__).parents[2]) + os.sep
_KEY = "memfit_where"


@contextmanager
def recording_where(model: nn.Module) -> Iterator[None]:
    """Trace inside this block and `where_of(node)` will know the origin of every node."""
    names = {id(module): name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, args: Any) -> None:
        stack.append(names.get(id(module), ""))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if stack:
            stack.pop()

    handles = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    )
    try:
        with fx_traceback.preserve_node_meta(), _Recorder(stack):
            yield
    finally:
        for handle in handles:
            handle.remove()
        fx_traceback.current_meta.pop("custom", None)


def line_of(error: BaseException) -> str:
    """The line of the user's code, or of a library that is neither torch nor memfit, in which an error came up: "model.py:42: `if x.sum() > 0:`"."""
    found = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))]
    if not found:
        return ""
    place = f"{os.path.basename(found[-1].filename)}:{found[-1].lineno}"
    return f"{place}: `{found[-1].line}`" if found[-1].line else place


def where_of(node: torch.fx.Node) -> str:
    return str((node.meta.get("custom") or {}).get(_KEY, ""))


_given: list[str] = []  # the place of what runs now, where the stack does not show it; tracing is one at a time


@contextmanager
def placed_at(place: str) -> Iterator[None]:
    """Ops that are traced inside this block come from `place`."""
    _given.append(place)
    try:
        yield
    finally:
        _given.pop()


def place_of(node: torch.fx.Node) -> str:
    """Module and line of a node of Dynamo's graph, as the recorder writes them."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"\['?(\w+)'?\]", r".\1", str(stack[-1][0])) if stack else ""
    path = re.sub(r"\.(_modules|__dict__)(?=\.)", "", path).removeprefix("L.model")
    module = path.rpartition("._memfit.model")[2].lstrip(".")  # where a tool's forward came to the fitted model, and it to the plain one
    files = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    line = next((f"{os.path.basename(f)}:{n}" for f, n in reversed(files) if not f.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))), "")
    return f"{module}, {line}" if module and line else module or line


class _Recorder(TorchFunctionMode):
    def __init__(self, modules: list[str]) -> None:
        super().__init__()
        self.modules = modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # .shape and the like: most calls, and no op
            return func(*args, **(kwargs or {}))
        fx_traceback.current_meta["custom"] = {_KEY: _given[-1] if _given else self._place()}
        return func(*args, **(kwargs or {}))

    def _place(self) -> str:
        module = next((name for name in reversed(self.modules) if name), "")
        line = _user_line()
        return f"{module}, {line}" if module and line else module or line


def _user_line() -> str:
    """The innermost stack frame of the model's own code, as file:line; empty when only torch's code calls torch."""
    frame = sys._getframe(3)
    inside = False  # past the modes that sit on top of the call
    while frame is not None:
        filename = frame.f_code.co_filename
        ours = filename.startswith(_OWN_FOLDER)
        if ours and inside:
            return ""  # the caller of the model: nothing further out is the model's
        inside = inside or not ours
        if not ours and not filename.startswith((_TORCH_FOLDER, "<")):
            return f"{os.path.basename(filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
