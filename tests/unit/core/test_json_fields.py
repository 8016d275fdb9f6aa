"""Typed access to untrusted JSON."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.core.errors import BadInput
from memfit.core.json_fields import WIDE, Fields


def test_values_come_out_as_they_are() -> None:
    fields = Fields(
        {"i": 3, "n": 1.5, "t": "x", "b": True, "l": [1, 2], "ll": [[1], []], "o": {"a": 1}, "p": [[1, 2]], "q": [None, 3, 4]}, "f"
    )
    assert fields.integer("i") == 3
    assert fields.number("n") == 1.5
    assert fields.text("t") == "x"
    assert fields.text("missing", "default") == "default"
    assert fields.boolean("b", False) is True
    assert fields.boolean("missing", False) is False
    assert fields.integers("l") == (1, 2)
    assert fields.integer_lists("ll") == ((1,), ())
    assert fields.object("o").integer("a") == 1
    assert fields.pairs("p") == ((1, 2),)
    assert fields.optional_integers("q", minimum_length=3) == (None, 3, 4)
    fields.done()


def test_what_nobody_asked_for_is_refused() -> None:
    fields = Fields({"size": 1, "szie": 2}, "f")
    fields.integer("size")
    with pytest.raises(BadInput, match="f: unknown field 'szie'; remove it or check its spelling"):
        fields.done()


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [], {}, 2**63, -(2**63), 10**4000])
def test_integers_are_integers(value: Any) -> None:
    with pytest.raises(BadInput, match="field 'x'"):
        Fields({"x": value}, "f").integer("x")
    with pytest.raises(BadInput, match="field 'x'"):
        Fields({"x": [value]}, "f").integers("x")


def test_wide_integers_are_for_sums() -> None:
    assert Fields({"x": 2**64}, "f").integer("x", maximum=WIDE) == 2**64
    with pytest.raises(BadInput):
        Fields({"x": 2**128}, "f").integer("x", maximum=WIDE)


@pytest.mark.parametrize("value", [True, "1", None, 10**301, float("inf"), -1e301])
def test_numbers_are_finite_numbers(value: Any) -> None:
    with pytest.raises(BadInput, match="should be a number"):
        Fields({"x": value}, "f").number("x")


SHAPES = [(read, value) for read in ("text", "object", "objects", "integer_lists", "pairs") for value in (3, [3], [[3]], None)]


@pytest.mark.parametrize(("read", "value"), [x for x in SHAPES if x != ("integer_lists", [[3]])])
def test_wrong_shapes_are_refused(read: str, value: Any) -> None:
    with pytest.raises(BadInput):
        getattr(Fields({"x": value}, "f"), read)("x")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadInput, match="f: field 'x' is missing"):
        Fields({}, "f").integer("x")


def test_choices_are_listed() -> None:
    with pytest.raises(BadInput, match="'c' is not one of a, b"):
        Fields({"x": "c"}, "f").choice("x", ("a", "b"))
