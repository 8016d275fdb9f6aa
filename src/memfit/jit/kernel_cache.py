"""Numba's cache of one kernel, which is never an error: what cannot be read is compiled again, what cannot be written is not kept.

It lies where numba has it, beside the kernel's file where that can be written; in memfit's cache folder if somebody chose one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching

from memfit.core.cache_folder import cache_folder, is_cache_chosen, warn_once

_HOUSE = Path(__file__).parents[1]
_DIGEST_BYTES = 32


class KernelCache(caching.FunctionCache):  # type: ignore[misc]
    """Of one function; anew when any file with kernels of its room changes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        numbas: Any = vars(self)["_cache_file"]
        folder = str(cache_folder("kernels")) if is_cache_chosen() else str(self.cache_path)
        self._cache_path = folder
        self._cache_file = _CheckedFile(
            cache_path=folder,
            filename_base=self._impl.filename_base,
            source_stamp=("with digests", numbas._source_stamp, list_sources(Path(function.__code__.co_filename))),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            warn_once(f"kernels kept in {self._cache_path} cannot be read ({type(error).__name__}): they are compiled again.")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:
            self._save_anew(sig, data)

    def has_entries(self) -> bool:
        """Whether anything is kept for the sources as they are."""
        try:
            return bool(self._cache_file._load_index())
        except Exception:
            return False

    def _save_anew(self, sig: Any, data: Any) -> None:
        """Over an index that is damaged."""
        try:
            self._cache_file.flush()
            super().save_overload(sig, data)
        except Exception as error:
            what = getattr(error, "strerror", None) or type(error).__name__
            warn_once(f"kernels cannot be kept in {self._cache_path} ({what}): every start compiles them again.")


class _CheckedFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Machine code is loaded only whole: each file of it begins with its digest."""

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(code).digest() + code)

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            raise ValueError("not what was written")
        return caching.pickle.loads(code)


def list_sources(file: Path) -> tuple[tuple[str, float, int], ...]:
    """The state of all files with kernels in a room: numba looks at a kernel's own file, but what it calls is compiled into it."""
    return _room_sources(file.relative_to(_HOUSE).parts[0]) if file.is_relative_to(_HOUSE) else ()


@cache
def _room_sources(room: str) -> tuple[tuple[str, float, int], ...]:
    files = sorted((_HOUSE / room).rglob("*.py"))
    sources = [path for path in files if path.name == "struct.py" or re.search(rb"^@\w*kernel", path.read_bytes(), re.MULTILINE)]
    return tuple((path.name, path.stat().st_mtime, path.stat().st_size) for path in sources)
