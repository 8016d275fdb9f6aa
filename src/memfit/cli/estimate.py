"""`memfit estimate FILE:FACTORY`: will it fit? Runs nothing and needs no GPU."""

from __future__ import annotations

import typer

from memfit.cli.console import JSON_OPTION, print_report
from memfit.cli.model_argument import MODEL_ARGUMENT, OPTIMIZER_OPTION, load_training


def command(
    model: str = MODEL_ARGUMENT,
    device: str | None = typer.Option(None, "--device", help='A GPU to judge for, e.g. "h200", "rtx4090"; an unknown name lists them.'),
    optimizer: str = OPTIMIZER_OPTION,
    time_limit: float = typer.Option(10.0, "--time-limit", help="Seconds to look for the smallest budget."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Peak memory of one training step: split by kind, where it peaks, the smallest budget memfit could reach, and whether it fits."""
    from memfit.api import estimate

    training = load_training(model, optimizer)
    recipe = training.recipe
    found = estimate(
        recipe.model,
        recipe.example_inputs,
        loss_fn=recipe.loss_fn,
        example_targets=recipe.example_targets,
        optimizer=training.optimizer,
        device=device,
        time_limit_s=time_limit,
    )
    print_report(found, as_json=as_json)
