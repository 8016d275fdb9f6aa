"""Reads files that users give and writes ours. What cannot be read or written is a one-line error; a file is written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from memfit.core.errors import BadInput
from memfit.core.units import format_bytes

MAX_FILE_BYTES = 256 * 2**20  # parsed JSON can take twenty times the room of its text


def read_text(path: str | Path) -> bytes:
    """A file's bytes, refused in one line when it is missing, unreadable or absurdly large."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""  # a pipe or device tells no size
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error}); check the path.") from None
    except ValueError as error:
        raise BadInput(f"{path}: cannot be a path ({error}).") from None
    if max(size, len(data)) > MAX_FILE_BYTES:
        shown = format_bytes(max(size, len(data)))
        raise BadInput(f"{path}: {shown} is more than the {format_bytes(MAX_FILE_BYTES)} a memfit file may have.")
    return data


def write_text(text: str | bytes, path: str | Path, *, force: bool = False) -> None:
    """Write a user's file, refused in one line where that is not possible."""
    target = Path(path)
    check_target(target, force=force)
    try:
        with write_whole(target) as file:
            file.write(text.encode() if isinstance(text, str) else text)
    except OSError as error:
        raise BadInput(f"{target}: cannot be written ({error.strerror or error}); nothing was changed.") from None


@contextmanager
def write_whole(path: str | Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A file beside the target that takes the target's name when the block ends well: an interrupted run leaves the old file or the new one,
    never half of one. A killed process leaves a file named `.memfit-*.tmp`. With `sync` the bytes are on the disk before the name changes."""
    target = Path(path)
    temporary = target.with_name(f".memfit-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_target(path: str | Path, *, force: bool) -> None:
    """Refuse a file that is in the way or a folder that is not there: call it before long work, not after."""
    target = Path(path)
    try:
        exists, is_folder, has_home = target.exists(), target.is_dir(), target.parent.is_dir()
    except (OSError, ValueError) as error:
        raise BadInput(f"{target}: cannot be written ({error}); check the path.") from None
    if "\0" in str(target):
        raise BadInput(f"{target}: cannot be a path (it holds a null character).")
    if is_folder or not target.name:
        raise BadInput(f"{target}: is a folder; name a file in it.")
    if exists and not force:
        raise BadInput(f"{target} exists: choose another name, or pass --force to overwrite it.")
    if not has_home:
        raise BadInput(f"{target}: there is no folder {target.parent}; make it first.")
