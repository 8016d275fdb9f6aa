"""The command line: a thin client of the library, one file per command.

stdout is data, stderr is progress and errors. Exit codes: 0 ok, 1 error, 2 usage, 3 proven infeasible, 4 gave up.
A command is a file here with a function `command`; its heavy imports happen inside it, so `memfit --help` stays quick.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

import typer

import memfit
from memfit.cli.console import only_data_on_stdout
from memfit.core.errors import InfeasibleBudget, MemfitError, NoPlanFound

_SHARED = {"console", "step", "torch_demo", "training"}  # helpers of the commands, not commands

app = typer.Typer(
    name="memfit",
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


for _module in pkgutil.iter_modules(__path__):
    if _module.name not in _SHARED:
        app.command(name=_module.name.replace("_", "-"))(import_module(f"{__name__}.{_module.name}").command)


def main() -> None:
    """Run the command line, turning our errors into one line and an exit code."""
    try:
        with only_data_on_stdout():
            app()
    except MemfitError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(3 if isinstance(error, InfeasibleBudget) else 4 if isinstance(error, NoPlanFound) else 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
