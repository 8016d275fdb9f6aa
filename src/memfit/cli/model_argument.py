"""What the commands that take a model share: its name on the command line, and an optimizer for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from memfit.core.errors import BadInput

if TYPE_CHECKING:
    import torch

    from memfit.capture.factory import Recipe

MODEL_ARGUMENT = typer.Argument(
    ..., help="FILE.py:FACTORY or package.module:FACTORY; the factory returns (model, inputs) or (model, inputs, loss_fn, targets)."
)
OPTIMIZER_OPTION = typer.Option("adamw", "--optimizer", help="adamw, adam, sgd, momentum, or none: its state counts against the budget.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    recipe: Recipe
    optimizer: torch.optim.Optimizer | None


def load_training(model: str, optimizer: str) -> Training:
    """Import the model and make its optimizer."""
    try:
        import torch
    except ModuleNotFoundError:
        raise BadInput("torch is not installed: pip install 'memfit[torch]'; the scheduling commands work without it.") from None
    from memfit.capture.factory import is_factory, load_recipe

    if not is_factory(model):
        raise BadInput(f"{model!r} does not name a model: write FILE.py:FACTORY or package.module:FACTORY.")
    recipe = load_recipe(model)
    parameters = [p for p in recipe.model.parameters() if p.requires_grad]
    makers = {
        "adamw": lambda: torch.optim.AdamW(parameters),
        "adam": lambda: torch.optim.Adam(parameters),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3),
        "momentum": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "none": lambda: None,
    }
    if optimizer not in makers:
        raise BadInput(f"optimizer {optimizer!r} is not known: choose one of {', '.join(makers)}.")
    return Training(recipe=recipe, optimizer=makers[optimizer]())
