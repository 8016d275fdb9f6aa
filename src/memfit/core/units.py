"""Bytes, fractions and durations as people write them. The only place that parses or prints them.

GB = 10**9 and GiB = 2**30, always. A single letter ("1.5g") is decimal: a budget read too small is safe, one read too
large is not.
"""

from __future__ import annotations

import re
from fractions import Fraction

from memfit.core.errors import BadInput

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_FACTOR = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{f"{p}ib": 2 ** (10 * (i + 1)) for i, p in enumerate("kmgtp")},
    **{f"{p}b": 10 ** (3 * (i + 1)) for i, p in enumerate("kmgtp")},
    **{p: 10 ** (3 * (i + 1)) for i, p in enumerate("kmgtp")},
}
_PATTERN = re.compile(r"\s*([0-9](?:[0-9_]*[0-9])?(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", re.ASCII)
_ACCEPTED = 'a whole number of bytes or text such as "6GiB", "6 GB", "512MiB" or "1.5g"'
MAX_BYTES = 2**63 - 1


def parse_bytes(value: int | str | float, *, what: str = "size") -> int:
    """Bytes from an integer or a text with a unit; `what` names the value in the error."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadInput(f"{what} {value!r} is a {type(value).__name__}, not a size: give {_ACCEPTED}.")
    if isinstance(value, str):
        return _parse_text(value, what)
    if value != value or value in (float("inf"), float("-inf")):
        raise BadInput(f"{what} {value!r} is not a finite number: give {_ACCEPTED}.")
    if value < 0:
        raise BadInput(f"{what} {value} is negative: give {_ACCEPTED}.")
    if value != int(value):
        raise BadInput(f"{what} {value!r} is not a whole number of bytes: give {_ACCEPTED}.")
    return _bounded(int(value), value, what)


def _parse_text(text: str, what: str) -> int:
    shown = text if len(text) <= 40 else text[:37] + "..."
    match = _PATTERN.fullmatch(text) if len(text) <= 100 else None
    factor = _FACTOR.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        sign = " is negative" if text.strip().startswith("-") else " cannot be read"
        raise BadInput(f"{what} {shown!r}{sign}: give {_ACCEPTED}.")
    exact = Fraction(match.group(1).replace("_", "")) * factor
    return _bounded(int(exact), shown, what)  # a fraction of a byte is rounded down: never more than was asked


def _bounded(num_bytes: int, value: object, what: str) -> int:
    if num_bytes > MAX_BYTES:
        raise BadInput(f"{what} {value!r} is above 2**63 - 1 bytes: give {_ACCEPTED}.")
    return num_bytes


def format_bytes(num_bytes: int, *, binary: bool = True) -> str:
    """For people: two decimals in the largest unit that leaves at least 1 (6.41 GiB). Rounded."""
    units = _BINARY if binary else _DECIMAL
    name, factor = max(((n, f) for n, f in units.items() if f <= max(abs(num_bytes), 1)), key=lambda u: u[1])
    return f"{num_bytes} B" if factor == 1 else f"{num_bytes / factor:.2f} {name}"


def exact_bytes(num_bytes: int, *, binary: bool = True) -> str:
    """For files and flags: the shortest text that `parse_bytes` reads back as exactly this number."""
    units = _BINARY if binary else _DECIMAL
    name, factor = max(((n, f) for n, f in units.items() if num_bytes % f == 0), key=lambda u: u[1] if num_bytes else -u[1])
    return f"{num_bytes // factor}{name}"


def format_ns(time_ns: float) -> str:
    """A duration for people: 12.3 ms, 4.56 s."""
    for name, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(time_ns) >= factor:
            return f"{time_ns / factor:.3g} {name}"
    return f"{time_ns:.0f} ns"


def format_percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"
