"""The command line: a thin client of the library, one file per command.

stdout is data, stderr is progress and errors. Exit codes: 0 ok, 1 error, 2 usage, 3 proven infeasible, 4 gave up.
A command is a file here with a function `command`: the file is imported when that command is asked for, and what the command
needs besides core when it runs, so that every command loads its own room only.
"""

from __future__ import annotations

import pkgutil
import sys
from typing import Any

import typer.core
import typer.main

import memfit
from memfit.cli.console import keep_stdout_for_data, say_cache_warnings
from memfit.core.errors import InfeasibleBudget, MemfitError, NoPlanFound
from memfit.lazy import Registry

_SHARED = {"console", "model_argument", "step_argument", "torch_demo"}  # helpers of the commands, not commands


class _Commands(Registry):
    def __getitem__(self, name: str) -> Any:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(name=name)(super().__getitem__(name))
        return typer.main.get_command(single)


class _Group(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        files = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED]
        super().__init__(**{**settings, "commands": _Commands({file.replace("_", "-"): f"{__name__}.{file}:command" for file in files})})


app = typer.Typer(
    name="memfit",
    cls=_Group,
    help="Train any PyTorch model inside a byte budget, and schedule memory for everything else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memfit {memfit.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version and stop."),
) -> None:
    pass


def main() -> None:
    """Run the command line, turning our errors into one line and an exit code."""
    try:
        with keep_stdout_for_data(), say_cache_warnings():
            app()
    except MemfitError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(3 if isinstance(error, InfeasibleBudget) else 4 if isinstance(error, NoPlanFound) else 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
