"""States as files: written whole or not at all, checked when read, one folder per run.

    folder/
      run.json          what the run is: length, shape and fingerprint of its first state
      state-120.mfs     x_120            header (JSON) + raw bytes + a checksum over both
      adjoint-87.mfs    y_87             the newest one says how far the backward sweep came

A file appears under its name only when it is complete and on the disk (fsync, rename), so a kill leaves old files or new ones.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from memfit.chain.run.states import Bytes, Structure, flatten, leaf_header, make_leaf, unflatten, view_bytes
from memfit.core.errors import BadInput, StorageFailed
from memfit.core.files import write_whole
from memfit.core.units import format_bytes

_MAGIC = b"memfit-state-1\n"
_NAME = re.compile(r"(state|adjoint)-(\d+)\.mfs")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FILE_OVERHEAD_BYTES = 4096  # header and block rounding, allowed for in every file


class StateFolder:
    """The files of one run. Holds a lock, so that two runs cannot share a folder; the lock dies with the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(folder / "lock", "w")  # noqa: SIM115 - held as long as the run
        except OSError as error:
            raise BadInput(f"{folder}: cannot hold checkpoints ({error.strerror or error}); give a folder that can be written.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise BadInput(f"{folder}: another run is using this folder; wait for it, or give each run a folder of its own.") from None

    def path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}-{step}.mfs"

    def write(self, kind: str, step: int, tree: Any) -> None:
        """Put x_step or y_step on disk. Raises StorageFailed and leaves everything else as it was."""
        leaves, structure = flatten(tree)
        fields = {"structure": structure.describe(), "tree": structure.to_json(), "leaves": [leaf_header(x) for x in leaves]}
        header = json.dumps(fields).encode()
        target = self.path(kind, step)
        try:
            with write_whole(target, sync=True) as file:
                checksum = zlib.crc32(header)
                file.write(_MAGIC + struct.pack("<Q", len(header)) + header)
                for leaf in leaves:
                    if leaf_header(leaf)["bytes"]:
                        data = view_bytes(leaf)
                        checksum = zlib.crc32(data, checksum)
                        file.write(data)
                file.write(struct.pack("<I", checksum))
        except OSError as error:
            raise self._failure(kind, step, sum(leaf_header(x)["bytes"] for x in leaves), error) from error

    def read(self, kind: str, step: int, model: Any = None) -> Any:
        """A tree in host memory, in the structure of `model` where that fits. Raises StorageFailed for a missing, cut or changed file."""
        path = self.path(kind, step)
        try:
            with open(path, "rb") as file:
                fields, leaves = _read_leaves(file, path)
        except OSError as error:
            raise StorageFailed(f"{path}: cannot be read ({error.strerror or error}); start again from an earlier state.") from error
        structure = flatten(model)[1]
        if structure.describe() != fields["structure"]:
            if kind == "state" or fields["tree"] is None:
                raise BadInput(
                    f"{path}: holds a tree shaped {fields['structure']}, the run's is {structure.describe()}: keep one structure throughout, "
                    "of dicts, lists and tuples where the adjoint's differs from the state's."
                )
            structure = Structure.from_json(fields["tree"])
        return unflatten(structure, iter(leaves))

    def drop(self, kind: str, step: int) -> None:
        self.path(kind, step).unlink(missing_ok=True)

    def steps(self, kind: str) -> list[int]:
        """Steps of which a complete file is here, ascending. Leftovers of an interrupted write are removed."""
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[2]) for match in found if match and match[1] == kind)

    def claim(self, description: dict[str, Any], *, resume: bool) -> None:
        """Say what this run is, or check that the files here belong to the same one."""
        path = self.folder / "run.json"
        if path.exists() and resume:
            try:
                known = json.loads(path.read_text())
            except (OSError, ValueError):
                known = None
            if known == description:
                return
            if known is not None or self.steps("state") or self.steps("adjoint"):
                raise BadInput(
                    f"{self.folder}: holds checkpoints of another run ({known}), not of {description}; give another folder, "
                    "or pass resume=False to throw them away."
                )
        self.clear()
        try:
            with write_whole(path) as file:
                file.write(json.dumps(description).encode())
        except OSError as error:
            raise self._failure("run", 0, len(json.dumps(description)), error) from error

    def clear(self) -> None:
        """Remove every file of a run; nothing else in the folder is touched."""
        for kind in ("state", "adjoint"):
            for step in self.steps(kind):
                self.drop(kind, step)
        (self.folder / "run.json").unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Let go of the folder; with `remove` leave nothing of ours in it."""
        if remove:
            self.clear()
            (self.folder / "lock").unlink(missing_ok=True)
        self._lock.close()

    def _failure(self, kind: str, step: int, size_bytes: int, error: OSError) -> StorageFailed:
        what = "run.json" if kind == "run" else f"{'x' if kind == 'state' else 'y'}_{step} ({format_bytes(size_bytes)})"
        cause = "the disk is full" if error.errno in _FULL else str(error.strerror or error)
        kept = len(self.steps("state"))
        return StorageFailed(
            f"{what} could not be written to {self.folder}: {cause}. {kept} complete checkpoints are safe there. Make room (or allow "
            "less with disk=...), then call run_chain again with the same folder: it goes on from them."
        )


def _read_leaves(file: IO[bytes], path: Path) -> tuple[dict[str, Any], list[Any]]:
    damaged = StorageFailed(f"{path}: the file is cut or changed (its checksum is wrong); delete it and start again from an earlier state.")
    start = file.read(len(_MAGIC) + 8)
    if len(start) != len(_MAGIC) + 8 or not start.startswith(_MAGIC):
        raise damaged
    (length,) = struct.unpack("<Q", start[len(_MAGIC) :])
    if length > os.fstat(file.fileno()).st_size:
        raise damaged
    header = file.read(length)
    checksum = zlib.crc32(header)
    try:
        fields = json.loads(header)
        sizes = [int(leaf["bytes"]) for leaf in fields["leaves"]]
    except (ValueError, KeyError, TypeError):
        raise damaged from None
    if sum(sizes) + length + len(start) + 4 != os.fstat(file.fileno()).st_size:
        raise damaged
    buffers: list[Bytes] = []
    for size in sizes:
        data = np.empty(size, dtype=np.uint8)
        if size and file.readinto(data.data) != size:  # type: ignore[attr-defined]
            raise damaged
        checksum = zlib.crc32(data.data, checksum) if size else checksum
        buffers.append(data)
    if struct.unpack("<I", file.read(4))[0] != checksum:
        raise damaged
    return fields, [make_leaf(leaf, data) for leaf, data in zip(fields["leaves"], buffers, strict=True)]
