"""Where compiled code lies: where the user has it, else in memfit's cache; in a folder that ends with this process where that is unusable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memfit.core.cache_folder import cache_folder, cannot_write, last_resort, warn_once

T = TypeVar("T")
_NAME = "TORCHINDUCTOR_CACHE_DIR"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def code_folder() -> Path:
    """The folder, which can be written. Inductor and its helper processes read it from the environment, so there it stands from now on:
    torch's default has a name that anybody could take first."""
    named = os.environ.get(_NAME)
    if named is None:
        _move_to(cache_folder("inductor"))
    elif (trouble := cannot_write(Path(named))) is not None:
        _leave(named, trouble)
    return Path(os.environ[_NAME])


def with_room(compile_code: Callable[[], T]) -> T:
    """Once more in another folder where this one turns out to be full."""
    try:
        return compile_code()
    except Exception as error:
        trouble = _find_no_room(error)
        if trouble is None or Path(os.environ.get(_NAME, "")) == last_resort() / "inductor":
            raise
        _leave(os.environ.get(_NAME, ""), trouble.strerror or str(trouble))
        return compile_code()


def _leave(folder: str, trouble: str) -> None:
    warn_once(
        f"compiled code cannot be kept in {folder} ({trouble}): this run goes on without, and the next one compiles again. Set {_NAME} or "
        "MEMFIT_CACHE_DIR to a folder that can be written."
    )
    _move_to(last_resort() / "inductor")


def _move_to(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_NAME] = str(folder)


def _find_no_room(error: BaseException | None) -> OSError | None:
    """Among an error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None
