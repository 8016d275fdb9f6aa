"""`memfit run FILE:FACTORY --budget 6GiB`: train a few steps inside the budget and say what was measured."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, cast

import typer

from memfit.cli.console import JSON_OPTION, print_json
from memfit.cli.model_argument import MODEL_ARGUMENT, OPTIMIZER_OPTION, load_training
from memfit.core.errors import BadInput
from memfit.core.io import load
from memfit.core.plan import Plan
from memfit.core.units import format_bytes


def command(
    model: str = MODEL_ARGUMENT,
    budget: str | None = typer.Option(
        None, "--budget", help='Device bytes the whole step may hold, e.g. "6GiB"; with --plan the budget it was made for.'
    ),
    steps: int = typer.Option(3, "--steps", min=1, help="Training steps to run."),
    optimizer: str = OPTIMIZER_OPTION,
    planner: str = typer.Option("auto", "--planner", help="Which planner; an unknown name lists them."),
    engine: str = typer.Option(
        "auto", "--engine", help="eager: PyTorch's own kernels; inductor: compiled regions; auto: compiled on CUDA."
    ),
    allow: list[str] = typer.Option(
        ["recompute", "variants"],
        "--allow",
        help="What a plan may do besides keeping values: recompute, variants, rounding, offload; once for each. An unknown word lists them.",
    ),
    time_limit: float = typer.Option(30.0, "--time-limit", help="Seconds the planner may take."),
    plan: Path | None = typer.Option(None, "--plan", help="A plan saved by `memfit plan -o`: run it without a solver."),
    replay: bool = typer.Option(False, "--replay", help="From the fifth step on, replay forward and backward from CUDA graphs."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Fit the model into the budget, train, and report predicted and measured peak, time, and whether gradients equal the plain model's."""
    import memfit

    if budget is None and plan is None:
        raise typer.BadParameter("give --budget, --plan or both.")
    training = load_training(model, optimizer)
    recipe = training.recipe
    fitted = memfit.fit(
        recipe.model,
        recipe.example_inputs,
        budget=budget if budget is not None else _budget_of(cast(Path, plan)),
        optimizer=training.optimizer,
        loss_fn=recipe.loss_fn,
        example_targets=recipe.example_targets,
        engine=engine,
        allow=tuple(allow),
        planner=planner,
        time_limit_s=time_limit,
        plan=plan,
        check=True,
        replay=replay,
    )
    seconds, losses = _train(fitted, recipe, training.optimizer, steps, model)
    report = fitted.report()
    if as_json:
        print_json({**report.as_data(), "losses": losses, "seconds_per_step": statistics.median(seconds)})
    else:
        typer.echo(str(report))
        typer.echo(
            f"trained    {steps} steps, loss {losses[0]:.6g} -> {losses[-1]:.6g}, {statistics.median(seconds) * 1e3:.1f} ms a step (median)"
        )
    if report.budget_bytes is not None and (report.measured_peak_bytes or 0) > report.budget_bytes:
        typer.echo(f"measured peak {format_bytes(report.measured_peak_bytes or 0)} is above the budget", err=True)
        raise typer.Exit(1)


def _budget_of(path: Path) -> int:
    limit = cast(Plan, load(path, Plan)).budget.device_bytes
    if limit is None:
        raise BadInput(f"{path}: the plan was made without a budget; give --budget.")
    return limit


def _train(fitted: Any, recipe: Any, optimizer: Any, steps: int, name: str) -> tuple[list[float], list[float]]:
    from memfit.capture.inputs import Inputs

    inputs = Inputs.of(recipe.example_inputs)
    targets = recipe.example_targets if isinstance(recipe.example_targets, (tuple, list)) else (recipe.example_targets,)
    seconds, losses = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = _loss_of(fitted(*inputs.args, *targets, **inputs.kwargs), name)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        fitted.zero_grad(set_to_none=True)
        losses.append(loss.item())  # also waits for the device
        seconds.append(time.perf_counter() - begin)
    return seconds, losses


def _loss_of(result: Any, name: str) -> Any:
    """A number that the model gives, by itself, as `loss`, or first of several."""
    found = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if found is None:
        found = result[0] if isinstance(result, (tuple, list)) and result else result
    if getattr(found, "numel", lambda: 0)() != 1 or not found.requires_grad:
        raise BadInput(
            f"{name}: to train, the model must give a loss (a number, alone, first or as `loss`), or the factory return "
            "(model, inputs, loss_fn, targets); memfit estimate works without a loss."
        )
    return found
