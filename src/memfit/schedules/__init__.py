"""Ready-made schedules that ship with memfit: plans for small models, to run without a solver and to look at.

    memfit.fit(*memfit.schedules.example("small_gpt"), plan=memfit.schedules.path("small_gpt"), ...)

Each is a plan file as `memfit plan -o` writes it; `index.json` says for which model, share of the keep-all peak and torch
version it was made. `python -m memfit.schedules --write` makes them again. A plan fits the graph it was made for, so on
another torch version, or on a GPU, it may be refused: make it again there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    Example = tuple[nn.Module, tuple[Any, ...], Callable[..., Any], tuple[Any, ...]]

FOLDER = Path(__file__).parent
RECIPES = {
    "small_gpt": {"factory": "small_gpt", "fraction": 0.5},
    "small_resnet": {"factory": "small_resnet", "fraction": 0.5},
    "small_resnet_third": {"factory": "small_resnet", "fraction": 0.34},
}


def names() -> tuple[str, ...]:
    return tuple(RECIPES)


def path(name: str) -> Path:
    """The plan file, for `fit(..., plan=...)` and `memfit run --plan`."""
    if name not in RECIPES:
        raise BadInput(f"no ready-made schedule is called {name!r}: there are {', '.join(RECIPES)}.")
    return FOLDER / f"{name}.json"


def index() -> dict[str, dict[str, Any]]:
    """What each schedule was made for: factory, share of the peak, torch version, bytes and overhead."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())
    return found


def example(name: str) -> Example:
    """The model, inputs, loss function and targets that a schedule is for."""
    path(name)
    factory: Callable[[], Example] = globals()[str(RECIPES[name]["factory"])]
    return factory()


def small_gpt() -> Example:
    """`memfit.schedules:small_gpt`: six blocks, width 128, 8 × 128 tokens, dropout and tied weights."""
    import torch

    from memfit.cli.torch_demo import SmallGPT

    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (8, 128))
    return _add_loss(SmallGPT(), tokens, tokens.roll(-1, 1).flatten())


def small_resnet() -> Example:
    """`memfit.schedules:small_resnet`: eight residual blocks of 24 channels, 16 images of 32 × 32."""
    import torch

    from memfit.cli.torch_demo import SmallResNet

    torch.manual_seed(0)
    return _add_loss(SmallResNet(), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))


def _add_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Example:
    import torch

    return model, (inputs,), torch.nn.functional.cross_entropy, (targets,)
