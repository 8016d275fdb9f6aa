"""Measurements kept on disk by digest, so that a second run starts at once. A broken cache is a cold cache, never an error."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from threading import Lock

from memfit.core.cache_folder import cache_folder, warn_once
from memfit.core.files import write_whole

_saving = Lock()
_MOST_NS = 2**62


class Cache:
    """(device, signature) -> (time_ns, workspace_bytes), in one JSON file."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or cache_folder()) / "op_costs_v1.json"
        self._entries: dict[str, list[int]] = _read(self._path)
        self._dirty = False

    def get(self, device: str, signature: str) -> tuple[int, int] | None:
        entry = self._entries.get(_key(device, signature))
        return None if entry is None else (entry[0], entry[1])

    def put(self, device: str, signature: str, costs: tuple[int, int]) -> None:
        self._entries[_key(device, signature)] = list(costs)
        self._dirty = True

    def save(self) -> None:
        """Merge with what others wrote meanwhile, and replace the file whole. A folder that cannot be written is said once."""
        if not self._dirty:
            return
        try:
            with _saving:  # threads of this process; of two processes that save at once one may lose what it measured
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._entries = {**_read(self._path), **self._entries}
                with write_whole(self._path) as file:
                    file.write(json.dumps(self._entries).encode())
            self._dirty = False
        except OSError as error:
            warn_once(f"measured costs cannot be kept in {self._path.parent} ({error.strerror or error}): the next start measures again.")


def _key(device: str, signature: str) -> str:
    return hashlib.sha256(f"{device}\n{signature}".encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, list[int]]:
    """What can be made sense of; a file that holds something else is said once, and replaced by the next save."""
    try:
        data = json.loads(path.read_bytes())
    except OSError:  # there is none, or saving will say what is wrong
        return {}
    except (ValueError, RecursionError) as error:
        warn_once(f"measured costs in {path} cannot be read ({type(error).__name__}): they are measured again.")
        return {}
    return {k: v for k, v in data.items() if _is_entry(v)} if isinstance(data, dict) else {}


def _is_entry(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int and 0 <= x < _MOST_NS for x in value)
