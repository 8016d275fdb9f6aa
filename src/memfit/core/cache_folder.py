"""The folder for what a second start finds again: costs, plans, kernels, compiled code. A cache is never an error.

chosen with `use_cache_folder` ─> MEMFIT_CACHE_DIR ─> the platform's own place
    └─ cannot be written, or others may write there ─> one warning, and a folder that ends with this process
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

_chosen: list[Path] = []
_PROBE_BYTES = 2**16


class CacheWarning(UserWarning):
    """A cache cannot be used: the work goes on, and the next start finds nothing."""


def use_cache_folder(folder: Path | None) -> None:
    """Keep costs and plans in `folder` from now on; None goes back to the usual place."""
    _chosen[:] = [] if folder is None else [folder]


def is_cache_chosen() -> bool:
    """Whether the user said where caches lie; otherwise a library's own may lie in its own place."""
    return bool(os.environ.get("MEMFIT_CACHE_DIR"))


def cache_folder(name: str = "") -> Path:
    """The folder for one kind of things (all of them without a name), made if it is not there, and readable by this user alone."""
    root = _chosen[0] if _chosen else _named_folder()
    trouble = find_trouble(root)
    if trouble is None and name:
        root = root / name
        trouble = find_trouble(root)
    if trouble is None:
        return root
    _say_lost(str(root), trouble)
    folder = last_resort() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def find_trouble(folder: Path) -> str | None:
    """Why nothing can be kept here; None where it can."""
    return cannot_write(folder) or _find_sharing(folder)


def cannot_write(folder: Path) -> str | None:
    """Why files cannot be written here; None where they can. What is missing of the path is made, for this user alone."""
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))  # a full disk takes empty files
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def warn_once(message: str) -> None:
    """Each trouble with a cache is said once in a process."""
    _warn(message)


@cache
def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=3)


def _named_folder() -> Path:
    named = os.environ.get("MEMFIT_CACHE_DIR")
    return Path(named).expanduser() if named else _platform_folder() / "memfit"


def _platform_folder() -> Path:
    """Where programs of this platform keep what can be made again."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else home / ".cache"


def _find_sharing(folder: Path) -> str | None:
    """What lies here is run as code, so nobody else may have put it there."""
    if not hasattr(os, "geteuid"):
        return None
    state = folder.stat()
    if state.st_uid != os.geteuid():
        return "it belongs to another user"
    has_own_group = state.st_gid == state.st_uid  # as most systems give each user
    others = stat.S_IWOTH | (0 if has_own_group else stat.S_IWGRP)
    return "other users may write there" if state.st_mode & others else None


def _say_lost(folder: str, trouble: str) -> None:
    warn_once(
        f"memfit cannot keep anything in {folder} ({trouble}): this run goes on without, and the next one starts cold. Set MEMFIT_CACHE_DIR "
        "to a folder of your own that can be written."
    )


@cache
def last_resort() -> Path:
    """An empty folder that ends with this process."""
    made = Path(tempfile.mkdtemp(prefix="memfit-"))
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: Path, owner: int) -> None:
    """A forked process does not take its parent's folder away."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
