"""What the planning commands take: a training step, from a model, a memfit.graph file or a node-link graph."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from memfit.core.costs import Costs, uniform_costs
from memfit.core.errors import BadInput
from memfit.core.graph import Graph
from memfit.core.io import load, read_text

if TYPE_CHECKING:
    from memfit.pipeline.forms import Forms

STEP_ARGUMENT = typer.Argument(
    ..., help="A model (FILE.py:FACTORY or package.module:FACTORY), a memfit.graph JSON file, or a node-link graph (networkx)."
)
COSTS_OPTION = typer.Option(None, "--costs", help="A memfit.costs JSON file for a memfit.graph; without it every op takes 1 ns.")
DEVICE_OPTION = typer.Option(
    None, "--device", help='For a model: a device of the table to cost it for ("h200", "cpu"); without it its ops are measured here.'
)
STEP_OPTIMIZER_OPTION = typer.Option(
    "adamw", "--optimizer", help="For a model: adamw, adam, sgd, momentum, or none; its state counts against the budget."
)
RESERVE_OPTION = typer.Option("0", "--reserve", help="For a model: bytes left for what the plan cannot see, such as a loss outside.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """`elsewhere_bytes` is what a budget must hold besides (as `fit` counts it); `others` are forms of the step that round otherwise."""

    graph: Graph
    costs: Costs
    others: Iterable[tuple[Graph, Costs]] = ()
    elsewhere_bytes: int = 0
    is_model: bool = False


def names_a_model(text: str) -> bool:
    """Whether the text is FILE.py:FACTORY or package.module:FACTORY and not a file of that name. Needs no torch."""
    head, colon, tail = text.rpartition(":")
    return bool(colon and head) and tail.isidentifier() and not Path(text).exists()


def load_step(
    name: str, costs: Path | None = None, *, device: str | None = None, optimizer: str = "adamw", reserve: str = "0"
) -> TrainingStep:
    """A graph with its costs from whatever `name` is."""
    if names_a_model(name):
        if costs is not None:
            raise BadInput(f"{name}: a model's ops are costed here; leave --costs out, or plan the graph file that --save-graph writes.")
        return _study(name, device, optimizer, reserve)
    from memfit.capture.node_link import is_node_link, parse_node_link

    try:
        data = json.loads(read_text(name))
    except (ValueError, RecursionError):
        data = None  # `load` says what is wrong with it
    if is_node_link(data):
        if costs is not None:
            raise BadInput(f"{name}: a node-link graph brings its own costs; leave --costs out.")
        graph, own_costs = parse_node_link(data, source=name)
        return TrainingStep(graph=graph, costs=own_costs)
    graph = cast(Graph, load(name, Graph))
    return TrainingStep(graph=graph, costs=cast(Costs, load(costs, Costs)) if costs else uniform_costs(graph))


def load_forms(name: str, optimizer: str, engine: str) -> Forms:
    """All forms of a model's step, made when they are asked for."""
    from memfit.cli.model_argument import load_training

    training = load_training(name, optimizer)
    from memfit.pipeline.forms import Forms
    from memfit.pipeline.task import task_and_call

    recipe = training.recipe
    task, call = task_and_call(recipe.model, recipe.example_inputs, recipe.loss_fn, recipe.example_targets, training.optimizer, None)
    return Forms(replace(task, engine=engine), call)


def _study(name: str, device: str | None, optimizer: str, reserve: str) -> TrainingStep:
    from memfit.cli.model_argument import load_training

    training = load_training(name, optimizer)
    from memfit.pipeline.study import study

    recipe = training.recipe
    studied = study(
        recipe.model,
        recipe.example_inputs,
        loss_fn=recipe.loss_fn,
        example_targets=recipe.example_targets,
        optimizer=training.optimizer,
        device=device,
        reserve=reserve,
    )
    others = ((form.captured.graph, form.costs) for form in studied.others)
    return TrainingStep(
        graph=studied.captured.graph, costs=studied.costs, others=others, elsewhere_bytes=studied.elsewhere_bytes, is_model=True
    )
