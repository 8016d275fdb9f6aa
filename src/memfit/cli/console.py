"""What every command shares: where data and progress go, and how a file is written."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import typer

from memfit.core.cache_folder import CacheWarning
from memfit.core.errors import one_line

JSON_OPTION = typer.Option(False, "--json", help="Print machine-readable JSON on stdout instead of a table.")
OUTPUT_OPTION = typer.Option(None, "-o", "--output", help="Write the result to this file.")
FORCE_OPTION = typer.Option(False, "--force", help="Overwrite the output file if it exists.")


@contextlib.contextmanager
def keep_stdout_for_data() -> Iterator[None]:
    """Libraries written in C (HiGHS now and then) print to file 1 whatever Python's stdout is: here that is stderr."""
    if sys.stdout is not sys.__stdout__ or sys.stdout is None or sys.stdout.fileno() != 1:
        yield  # somebody else has taken care of it
        return
    plain = sys.stdout
    plain.flush()
    ours = os.fdopen(os.dup(1), "w", encoding=plain.encoding, errors=plain.errors, buffering=1 if plain.isatty() else -1)
    os.dup2(2, 1)
    sys.stdout = ours
    try:
        yield
    finally:
        sys.stdout = plain
        os.dup2(ours.fileno(), 1)
        ours.close()


@contextlib.contextmanager
def say_cache_warnings() -> Iterator[None]:
    """As one line each on stderr, without the line of ours that raised them."""
    usual = warnings.formatwarning

    def format_plainly(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        return f"warning: {message}\n" if issubclass(category, CacheWarning) else usual(message, category, filename, lineno, line)

    warnings.formatwarning = format_plainly
    try:
        yield
    finally:
        warnings.formatwarning = usual


def print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data))


def print_result(fields: Mapping[str, Any], rows: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """The same result twice: its fields for programs, or its rows for people."""
    if as_json:
        print_json(fields)
    else:
        print_table(rows)


class Report(Protocol):
    """A result that prints itself: as fields, or as text."""

    def as_data(self) -> Mapping[str, Any]: ...


def print_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        print_json(report.as_data())
    else:
        typer.echo(str(report))


@contextlib.contextmanager
def show_status(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr while a command works, and the function that changes it; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


def print_table(rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, name and value, aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {one_line(value)}")


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Any number of columns, aligned; the first row is their head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def wrote(path: Path, next_command: str = "") -> None:
    """The last line of a command that made a file: what was written, and what to do with it."""
    typer.echo(f"Wrote {path}" + (f"; next: {next_command}" if next_command else ""), err=True)
