"""Bytes, fractions and durations as people write them. The only place that parses or prints them.

GB = 10**9 and GiB = 2**30, always. A single letter ("1.5g") is decimal: a budget read too small is safe, one read too
large is not.
"""

from __future__ import annotations

import math
import operator
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
MAX_SUM = 2**62
"""What sizes and times of one problem stay below together, so that sums of two of them fit in 64 bits."""


def parse_bytes(value: int | str | float, *, what: str = "size") -> int:
    """Bytes from an integer or a text with a unit; `what` names the value in the error."""
    if isinstance(value, str):
        return _parse_text(value, what)
    if isinstance(value, bool) or not (isinstance(value, float) or hasattr(value, "__index__")):
        raise BadInput(f"{what} {str(value)[:40]!r} is a {type(value).__name__}, not a size: give {_ACCEPTED}.")
    number = value if isinstance(value, float) else operator.index(value)  # numpy's integers too
    if isinstance(number, float) and not math.isfinite(number):
        raise BadInput(f"{what} {number} is not a finite number: give {_ACCEPTED}.")
    if number < 0:
        raise BadInput(f"{what} {_shorten(number)} is negative: give {_ACCEPTED}.")
    if number != int(number):
        raise BadInput(f"{what} {number} is not a whole number of bytes: give {_ACCEPTED}.")
    return _check_limit(int(number), _shorten(number), what)


def _shorten(number: float) -> str:
    """An integer of thousands of digits cannot be printed, and nobody would read it."""
    return str(number) if abs(number) < 10**40 else "of more than 40 digits"


def _parse_text(text: str, what: str) -> int:
    shown = text if len(text) <= 40 else text[:37] + "..."
    match = _PATTERN.fullmatch(text) if len(text) <= 100 else None
    factor = _FACTOR.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        sign = " is negative" if text.strip().startswith("-") else " cannot be read"
        raise BadInput(f"{what} {shown!r}{sign}: give {_ACCEPTED}.")
    exact = Fraction(match.group(1).replace("_", "")) * factor
    return _check_limit(int(exact), repr(shown), what)  # a fraction of a byte is rounded down: never more than was asked


def _check_limit(num_bytes: int, shown: str, what: str) -> int:
    if num_bytes > MAX_BYTES:
        raise BadInput(f"{what} {shown} is above 2**63 - 1 bytes: give {_ACCEPTED}.")
    return num_bytes


def format_bytes(num_bytes: int, *, binary: bool = True) -> str:
    """For people: two decimals in the largest unit that leaves at least 1 (6.41 GiB). Rounded."""
    units = _BINARY if binary else _DECIMAL
    fitting = [(n, f) for n, f in units.items() if f == 1 or abs(num_bytes) >= f * 0.999995]  # 1024.00 KiB is 1.00 MiB
    name, factor = fitting[-1]
    return f"{num_bytes} B" if factor == 1 else f"{num_bytes / factor:.2f} {name}"


def exact_bytes(num_bytes: int, *, binary: bool = True) -> str:
    """For files and flags: the shortest text that `parse_bytes` reads back as exactly this number."""
    units = _BINARY if binary else _DECIMAL
    name, factor = max(((n, f) for n, f in units.items() if num_bytes % f == 0), key=lambda u: u[1] if num_bytes else -u[1])
    return f"{num_bytes // factor}{name}"


def format_ns(time_ns: float) -> str:
    """A duration for people: 12.3 ms, 4.56 s."""
    for name, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        scaled = abs(time_ns) / factor
        if scaled >= 0.9995:  # 999.9 us is printed as 1 ms, not as 1e+03 us
            return f"{time_ns / factor:.3g} {name}" if scaled < 999.5 else f"{time_ns / factor:.0f} {name}"
    return f"{time_ns:.0f} ns"


def format_percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def simplify_number(value: float) -> float:
    """A whole number as an integer: what is given as 3 comes back as 3, not as 3.0."""
    return int(value) if math.isfinite(value) and value == int(value) else value
