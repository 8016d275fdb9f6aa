"""Inductor's keys on disk: the same for the same graph in every process, quick to make."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.compilers.inductor import private
from memfit.torch_private.patch import Patch

CODE_VERSION = "memfit 3"
"""Part of every key. It changes with `lowerings.py`, which changes what is written for the same graph."""


@contextmanager
def pickle_formats_by_name() -> Iterator[None]:
    """Keys are hashes of pickles, and a memory format is pickled with the name of whichever module of this process imported torch
    first: another script would not find what this one left."""
    copyreg.pickle(torch.memory_format, lambda value: (_find_format, (str(value).removeprefix("torch."),)))
    try:
        yield
    finally:
        copyreg.dispatch_table.pop(torch.memory_format, None)


def _find_format(name: str) -> torch.memory_format:
    found: torch.memory_format = getattr(torch, name)
    return found


def skip_key_log() -> list[Patch]:
    """Beside a key Inductor makes a line of text for each of the 600 settings in it, for its log: half of the time of finding code on disk."""
    pickler = private.graph_pickler()
    return [Patch(pickler, "debug_lines", lambda _, __: [])] if "debug_lines" in vars(pickler) else []
