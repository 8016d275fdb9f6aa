"""Inductor's processes that build kernels: woken early, and given the kernels of many pieces at once.

this process   code for piece 1 | code for piece 2 | code for piece 3 | ...  take in what is built
builders                kernels of 1, 2, 3, ... side by side
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memfit.compilers.inductor import private
from memfit.torch_private.patch import Patch, patch_torch

_PIPE_BYTES = 2**20


@contextmanager
def build_together() -> Iterator[Callable[[], bool]]:
    """Kernels of all pieces compiled inside this block are built side by side: code for the next is written meanwhile.

    Gives a function for whoever has nothing else to do: it takes in what has been built, and says whether that is all.
    """
    builder_class = private.async_compile()
    wait = builder_class.wait
    waiting = list[tuple[Any, dict[str, Any]]]()

    def settle() -> bool:
        entries = [(_is_built(scope), builder, scope) for builder, scope in waiting]
        waiting[:] = [(builder, scope) for built, builder, scope in entries if not built]
        for built, builder, scope in entries:
            if built:
                wait(builder, scope)
        return not waiting

    patches = (
        Patch(builder_class, "wait", lambda builder, scope: waiting.append((builder, scope))),
        Patch(builder_class, "use_process_pool", classmethod(_can_queue)),
    )
    try:
        with patch_torch("build kernels together", *patches), pause_collector():
            yield settle
    finally:
        for builder, scope in waiting:
            wait(builder, scope)


@contextmanager
def pause_collector() -> Iterator[None]:
    """Writing code makes millions of small objects and hardly a cycle among them: a seventh of its time went into looking for some."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_built(scope: Mapping[str, Any]) -> bool:
    """Whether the kernels that a module of generated code waits for have come out of the pool."""
    kernels = [v for v in scope.values() if isinstance(v, private.code_future())]
    return all((job := getattr(k, "future", None)) is not None and job.done() for k in kernels)


def _can_queue(_: type) -> bool:
    """In place of whether the builders are awake: until then Inductor would build here, one after another."""
    return private.compile_threads()() > 1 and not getattr(private.config().triton, "proton_profiling", False)


@functools.cache
def wake_builders() -> None:
    """They take seconds to start, and do so while the model is traced."""
    builder_class = private.async_compile()
    builder_class.warm_pool()
    builder_class.use_process_pool()
    if builder_class._ready_future is not None:
        widen_pipe(builder_class.process_pool())


def widen_pipe(pool: Any) -> bool:
    """Let a pool take jobs before its process is awake to read them: a pipe of the usual size holds a few kernels, and then we wait."""
    try:
        import fcntl

        return fcntl.fcntl(pool.write_pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES) >= _PIPE_BYTES
    except (ImportError, AttributeError, OSError):  # not Linux, another kind of pool, not allowed
        return False
