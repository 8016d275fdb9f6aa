"""Measurements kept on disk by digest, so that a second run starts at once. A broken cache is a cold cache, never an error."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from memfit.core.files import write_whole

_chosen: list[Path] = []


def use_folder(folder: Path | None) -> None:
    """Keep measurements in `folder` from now on; None goes back to the home folder's cache."""
    _chosen[:] = [] if folder is None else [folder]


def default_folder() -> Path:
    """The folder chosen with `use_folder`, or the one in the home folder."""
    return _chosen[0] if _chosen else Path(os.path.expanduser("~")) / ".cache" / "memfit"


class Cache:
    """(device, signature) -> (time_ns, workspace_bytes), in one JSON file."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or default_folder()) / "op_costs_v1.json"
        self._entries: dict[str, list[int]] = _read(self._path)
        self._dirty = False

    def get(self, device: str, signature: str) -> tuple[int, int] | None:
        entry = self._entries.get(_key(device, signature))
        return None if entry is None else (entry[0], entry[1])

    def put(self, device: str, signature: str, costs: tuple[int, int]) -> None:
        self._entries[_key(device, signature)] = list(costs)
        self._dirty = True

    def save(self) -> None:
        """Merge with what another process wrote meanwhile, and replace the file whole. A read-only home is not an error."""
        if not self._dirty:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._entries = {**_read(self._path), **self._entries}
            with write_whole(self._path) as file:
                file.write(json.dumps(self._entries).encode())
            self._dirty = False
        except OSError:
            return


def _key(device: str, signature: str) -> str:
    return hashlib.sha256(f"{device}\n{signature}".encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, list[int]]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {k: v for k, v in data.items() if isinstance(v, list) and len(v) == 2 and all(type(x) is int and x >= 0 for x in v)}
