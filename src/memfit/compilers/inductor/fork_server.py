"""The process that writers of code are forked from, where it runs.

    this process ──exec──> that one: imports what writing needs, never looks at the GPU ──fork──> writer, writer, writer, ...

torch's own pool of processes looks at the GPU before it forks, after which a fork cannot; and one that starts every writer anew
imports torch as often. Both are decided in its main module, where the pool's pickler is made: that is the way in.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPickler

_NOT_BY_THE_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"  # whether there is a GPU: asking the driver would be looking at it


class PreparingPickler(SubprocPickler):
    """A plain pickler; made in the main module of the new process it has that process prepared for writers."""

    def __init__(self) -> None:
        main = sys.modules["__main__"]
        if is_fork_server(main):
            main.pre_fork_setup = partial(_prepare, main)  # type: ignore[attr-defined]


def is_fork_server(module: Any) -> bool:
    """Whether it is the main module of torch's pools, as far as it is needed here."""
    return hasattr(module, "SubprocMain") and hasattr(module, "pre_fork_setup")


@contextmanager
def hide_driver() -> Iterator[None]:
    """Around starting the process: what it imports may ask whether there is a GPU, and must not ask the driver."""
    before = os.environ.get(_NOT_BY_THE_DRIVER)
    os.environ[_NOT_BY_THE_DRIVER] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NOT_BY_THE_DRIVER]
        else:
            os.environ[_NOT_BY_THE_DRIVER] = before


def _prepare(main: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for us
    os.setsid()  # so that writers can be ended together
    preload()
    gc.disable()  # writers end before it would matter
    gc.freeze()
    import torch

    if torch.cuda.is_initialized():  # forks could not write: every writer starts anew
        plain = main.SubprocMain
        main.SubprocMain = lambda pickler, kind, *rest: plain(pickler, SubprocKind.SPAWN, *rest)


def preload() -> None:
    """What the first region of a process imports and counts."""
    import torch._inductor.codegen.cuda_combined_scheduling
    import torch._inductor.compile_fx
    import torch._inductor.graph  # noqa: F401
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    import memfit.compilers.inductor.code_writers  # noqa: F401
    from memfit.compilers.inductor.compiler import decomposition_table

    decomposition_table()
    if HAS_TRITON:
        triton_key()
