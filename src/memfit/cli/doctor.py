"""`memfit doctor FILE:FACTORY`: why a budget is refused, and what would lower it. Runs nothing and needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_report, wrote
from memfit.cli.model_argument import MODEL_ARGUMENT, OPTIMIZER_OPTION, load_training
from memfit.core.files import check_target, write_text


def command(
    model: str = MODEL_ARGUMENT,
    budget: str | None = typer.Option(None, "--budget", help='The budget that was refused or is slow, e.g. "6GiB".'),
    device: str | None = typer.Option(None, "--device", help='A GPU to cost the ops for, e.g. "h200"; an unknown name lists them.'),
    optimizer: str = OPTIMIZER_OPTION,
    reserve: str = typer.Option("0", "--reserve", help="Bytes left for what the plan cannot see, such as a loss outside."),
    allow: str = typer.Option("recompute,variants", "--allow", help="As fit's allow=, with commas."),
    time_limit: float = typer.Option(10.0, "--time-limit", help="Seconds to look for the smallest budget that has a plan."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """One screen for a budget that is refused or slow: what holds the minimum, what lowers it, and the next budget to ask for."""
    if output:
        check_target(output, force=force)
    training = load_training(model, optimizer)
    from memfit.api import doctor

    recipe = training.recipe
    found = doctor(
        recipe.model,
        recipe.example_inputs,
        loss_fn=recipe.loss_fn,
        example_targets=recipe.example_targets,
        optimizer=training.optimizer,
        budget=budget,
        reserve=reserve,
        device=device,
        allow=tuple(filter(None, allow.split(","))),
        time_limit_s=time_limit,
    )
    print_report(found, as_json=as_json)
    if output:
        write_text(json.dumps(found.as_data()) + "\n", output, force=force)
        wrote(output)
