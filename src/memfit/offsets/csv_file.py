"""Buffers from a CSV file in minimalloc's format: `id,lower,upper,size`, lives half open, one buffer a line.

id,lower,upper,size            optional columns: alignment, offset (fixed), arena
0,995328,1000448,656384        also known as: start and stop (or end) for lower and upper
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from memfit.core.errors import BadInput
from memfit.core.io import read_text
from memfit.core.packing import Buffer, Packing

_NAMES = {"start": "lower", "begin": "lower", "stop": "upper", "end": "upper"}
_NEEDED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "offset", "arena")


def read_buffers(path: str | Path) -> tuple[Buffer, ...]:
    """The buffers of a file; anything that is not one is refused in a line that names the row."""
    try:
        text = read_text(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not UTF-8 text, so not a CSV file of buffers.") from None
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise BadInput(f"{path}: not a CSV file ({error}).") from None
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise BadInput(f"{path}: empty; the first line must be id,lower,upper,size.")
    columns = _columns(rows[0], path)
    return tuple(_buffer(row, columns, f"{path}: row {k}") for k, row in enumerate(rows[1:], 2))


def write_offsets(packing: Packing) -> str:
    """The same columns with the offsets found, as CSV text."""
    lines = ["id,lower,upper,size,alignment,arena,offset"]
    for b, at in zip(packing.buffers, packing.offsets, strict=True):
        name = '"' + b.id.replace('"', '""') + '"' if any(c in b.id for c in ',"\n\r') else b.id
        lines.append(f"{name},{b.start},{b.stop},{b.size},{b.alignment},{b.arena},{at}")
    return "\n".join(lines) + "\n"


def _columns(header: list[str], path: str | Path) -> dict[str, int]:
    names = [cell.strip().lower() for cell in header]
    names = [_NAMES.get(name, name) for name in names]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise BadInput(f"{path}: the first line has no column {', '.join(missing)}; it must be id,lower,upper,size.")
    return {name: names.index(name) for name in (*_NEEDED, *_OPTIONAL) if name in names}


def _buffer(row: list[str], columns: Mapping[str, int], where: str) -> Buffer:
    cells = {name: row[at].strip() if at < len(row) else "" for name, at in columns.items()}
    if not cells["id"]:
        raise BadInput(f"{where}: has no id.")
    return Buffer(
        id=cells["id"],
        start=_integer(cells["lower"], f"{where}: lower"),
        stop=_integer(cells["upper"], f"{where}: upper"),
        size=_integer(cells["size"], f"{where}: size"),
        alignment=_integer(cells.get("alignment") or "1", f"{where}: alignment"),
        offset=_integer(cells["offset"], f"{where}: offset") if cells.get("offset") else None,
        arena=_integer(cells.get("arena") or "0", f"{where}: arena"),
    )


def _integer(text: str, what: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        raise BadInput(f"{what} {text[:40]!r} is not a whole number of at most 19 digits.")
    return int(text)
