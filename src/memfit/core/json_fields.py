"""Reading untrusted JSON: typed access to the fields of an object or the entries of a row, with one-line errors.

fields = Fields({"seconds": 1.5, "name": "x"}, "plan.json: plan")
fields.number("seconds"), fields.text("name"), fields.done()      # done() refuses what nobody asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.core.errors import BadInput

_MISSING: Any = object()
_MAX_INT = 2**63 - 1
WIDE = 2**127
"""Sums over many steps (a timeline's bytes and times) may pass 2**63 where no single value does."""


class Fields:
    """The values of one JSON object (keys are names) or one row (keys are positions)."""

    def __init__(self, data: Any, where: str) -> None:
        self._data: Any = data
        self._where = where
        self._asked: set[str | int] = set()

    def names(self) -> tuple[str, ...]:
        return tuple(self._data)

    def done(self) -> None:
        """Refuse fields that no reader asked for: a typo must not be ignored."""
        unknown = [key for key in self._data if key not in self._asked]
        if unknown:
            raise BadInput(f"{self._where}: unknown field {str(unknown[0])[:40]!r}; remove it or check its spelling.")

    def is_null(self, key: str) -> bool:
        return self._get(key) is None

    def integer(self, key: str | int, *, minimum: int = -_MAX_INT, maximum: int = _MAX_INT) -> int:
        return self._integer(self._get(key), key, minimum, maximum)

    def number(self, key: str | int) -> float:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
            raise self._wrong(key, "a number", value)
        return value

    def text(self, key: str | int, default: str = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def choice(self, key: str | int, allowed: Sequence[str]) -> str:
        return self.checked_choice(self.text(key), allowed)

    def checked_choice(self, value: str, allowed: Sequence[str]) -> str:
        if value not in allowed:
            raise BadInput(f"{self._where}: {value[:40]!r} is not one of {', '.join(allowed)}.")
        return value

    def integers(self, key: str, *, minimum: int = -_MAX_INT, maximum: int = _MAX_INT) -> tuple[int, ...]:
        values = self._list(key)
        for value in values:
            if type(value) is not int or not minimum <= value <= maximum:
                raise self._wrong(key, f"a list of {_describe(minimum, maximum)}s", value)
        return tuple(values)

    def optional_integers(self, key: str, *, minimum_length: int) -> tuple[int | None, ...]:
        values = self._list(key)
        if len(values) < minimum_length:
            raise BadInput(f"{self._where}: field {key!r} has {len(values)} entries, at least {minimum_length} are expected.")
        return tuple(None if v is None else self._integer(v, key, 0, _MAX_INT) for v in values)

    def integer_lists(self, key: str) -> tuple[tuple[int, ...], ...]:
        lists = self._list(key)
        return tuple(Fields({"row": row}, f"{self._where}.{key}[{i}]").integers("row") for i, row in enumerate(lists))

    def pairs(self, key: str, default: Any = _MISSING) -> tuple[tuple[int, int], ...]:
        return tuple((row.integer(0), row.integer(1)) for row in self.rows(key, 2, default))

    def rows(self, key: str, width: int, default: Any = _MISSING) -> list[Fields]:
        """A list of lists of exactly `width` entries, each read by position."""
        found = []
        for i, row in enumerate(self._list(key, default)):
            if not isinstance(row, list) or len(row) != width:
                raise self._wrong(f"{key}[{i}]", f"a list of {width} entries", row)
            found.append(Fields(dict(enumerate(row)), f"{self._where}: {key}[{i}]"))
        return found

    def object(self, key: str) -> Fields:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Fields(value, f"{self._where}: {key}")

    def objects(self, key: str, default: Any = _MISSING) -> list[Fields]:
        found = []
        for i, value in enumerate(self._list(key, default)):
            if not isinstance(value, dict):
                raise self._wrong(f"{key}[{i}]", "an object", value)
            found.append(Fields(value, f"{self._where}: {key}[{i}]"))
        return found

    def _list(self, key: str, default: Any = _MISSING) -> list[Any]:
        value = self._get(key, default)
        if not isinstance(value, (list, tuple)):
            raise self._wrong(key, "a list", value)
        return list(value)

    def _integer(self, value: Any, key: str | int, minimum: int, maximum: int) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._wrong(key, f"a {_describe(minimum, maximum)}", value)
        return value

    def _get(self, key: str | int, default: Any = _MISSING) -> Any:
        self._asked.add(key)
        value = self._data.get(key, default)
        if value is _MISSING:
            raise BadInput(f"{self._where}: field {key!r} is missing.")
        return value

    def _wrong(self, key: str | int, expected: str, value: Any) -> BadInput:
        return BadInput(f"{self._where}: field {key!r} should be {expected}, not {_show(value)}.")


def _describe(minimum: int, maximum: int) -> str:
    return f"{'non-negative ' if minimum == 0 else ''}whole number below 2**{maximum.bit_length() if maximum == _MAX_INT else 127}"


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 2**127:
        return "an absurdly large number"  # one of thousands of digits cannot even be printed
    return "null" if value is None else repr(value)[:40]
