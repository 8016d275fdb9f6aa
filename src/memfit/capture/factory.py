"""Models by name: `file.py:factory` or `package.module:factory`.

The factory returns (model, example_inputs) or (model, example_inputs, loss_fn, example_targets). It is the user's own
code and is run as such.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from memfit.core.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a factory gave."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None = None
    example_targets: Any = ()


def is_factory(text: str) -> bool:
    """Whether the text names a factory rather than a file of ours."""
    head, colon, tail = text.rpartition(":")
    return bool(colon) and tail.isidentifier() and bool(head)


def load_recipe(text: str) -> Recipe:
    """Import the module, call the factory, and check what it returns."""
    head, _, name = text.rpartition(":")
    module = _import_file(Path(head)) if head.endswith(".py") else _import_module(head)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise BadInput(f"{text}: {head} has no function {name!r}; name a function that returns (model, example_inputs).")
    result = factory()
    if not isinstance(result, tuple) or len(result) not in (2, 4) or not isinstance(result[0], nn.Module):
        raise BadInput(
            f"{text}: the factory must return (model, example_inputs) or (model, example_inputs, loss_fn, example_targets), not a {type(result).__name__}"
            f"{f' of {len(result)}' if isinstance(result, tuple) else ''}."
        )
    if len(result) == 2:
        return Recipe(model=result[0], example_inputs=result[1])
    return Recipe(model=result[0], example_inputs=result[1], loss_fn=result[2], example_targets=result[3])


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise BadInput(f"{path}: no such file; a model is named FILE.py:FACTORY.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    sys.path.insert(0, ".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"module {name!r} cannot be imported ({error}): a model is named package.module:FACTORY or FILE.py:FACTORY."
        ) from None
