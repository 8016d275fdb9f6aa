"""The pool of processes that write code: how many, how they start, and how they end."""

from __future__ import annotations

import atexit
import functools
import os
import signal
from typing import Any

from memfit.compilers.inductor import private
from memfit.compilers.inductor.kernel_builders import widen_pipe

_MOST_WRITERS = 12


def num_writers() -> int:
    """How many would pay: three of four cores (kernels are built beside), if Inductor keeps anything on disk."""
    config = private.config()
    return min(private.compile_threads()() * 3 // 4, _MOST_WRITERS) if config.fx_graph_cache and not config.force_disable_caches else 0


@functools.cache
def writer_pool() -> Any:
    """Processes that can use the GPU, which a fork of this one could not (`fork_server.py`). `end_writer_pool` when they are done."""
    from memfit.compilers.inductor.fork_server import PreparingPickler, hide_driver, is_fork_server

    kinds = private.pool_kind()
    kind = kinds.FORK if is_fork_server(private.worker_main()) else kinds.SPAWN
    with hide_driver():
        pool = private.pool()(num_writers(), pickler=PreparingPickler(), kind=kind, quiesce=True)
    widen_pipe(pool)
    atexit.register(end_writer_pool)
    return pool


def end_writer_pool() -> None:
    """If there is one: now, whatever it is doing."""
    if writer_pool.cache_info().currsize:
        pool = writer_pool()
        writer_pool.cache_clear()
        _end(pool)


def _end(pool: Any) -> None:
    with pool.write_lock:
        pool.running = False  # nobody need be told that it ended
    if pool.timer is not None:
        pool.timer.quit()
    try:
        os.killpg(pool.process.pid, signal.SIGKILL)  # writers are in its group
    except OSError:  # as long as it has none of its own it has no writers
        pool.process.kill()
    pool.process.wait()
