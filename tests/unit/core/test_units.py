"""Sizes as people write them."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import BadInput
from memfit.core.units import MAX_BYTES, exact_bytes, format_bytes, format_ns, format_percent, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * 2**30),
        ("6 GB", 6 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("1.5G", 1_500_000_000),
        (" 12 kb ", 12_000),
        ("3KiB", 3072),
        ("1_000", 1000),
        ("17", 17),
        ("17 bytes", 17),
        (".5MB", 500_000),
        ("0", 0),
        ("0.3B", 0),
        ("1.9999B", 1),
        (17, 17),
        (17.0, 17),
        (0, 0),
        (np.int64(5), 5),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_accepted(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected  # type: ignore[arg-type]
    assert type(parse_bytes(text)) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("banana", "cannot be read"),
        ("", "cannot be read"),
        ("   ", "cannot be read"),
        ("GiB", "cannot be read"),
        ("6 GiB GiB", "cannot be read"),
        ("6XB", "cannot be read"),
        ("1e9", "cannot be read"),
        ("0x10", "cannot be read"),
        ("٣GB", "cannot be read"),
        ("nan", "cannot be read"),
        ("1\n2", "cannot be read"),
        ("9" * 200, "cannot be read"),
        ("-1", "is negative"),
        ("-6GiB", "is negative"),
        (-1, "is negative"),
        (-0.5, "is negative"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        (float("-inf"), "not a finite number"),
        (1.5, "not a whole number"),
        (True, "is a bool"),
        (None, "is a NoneType"),
        ([6], "is a list"),
        (2**63, "above 2"),
        ("9e", "cannot be read"),
        ("9999999PiB", "above 2"),
        pytest.param(10**5000, "above 2", id="huge"),
        pytest.param(-(10**5000), "is negative", id="-huge"),
    ],
)
def test_refused_with_what_is_accepted(value: object, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint) as refusal:
        parse_bytes(value, what="budget")  # type: ignore[arg-type]
    message = str(refusal.value)
    assert message.startswith("budget ")
    assert '"6GiB"' in message
    assert "\n" not in message
    assert len(message) < 250


@given(st.integers(0, MAX_BYTES), st.booleans())
def test_exact_bytes_loses_nothing(num_bytes: int, binary: bool) -> None:
    assert parse_bytes(exact_bytes(num_bytes, binary=binary)) == num_bytes


@given(st.integers(0, MAX_BYTES), st.booleans())
def test_format_bytes_is_within_rounding(num_bytes: int, binary: bool) -> None:
    text = format_bytes(num_bytes, binary=binary)
    if num_bytes < MAX_BYTES // 2:  # rounding up from the largest size gives one that is refused
        assert abs(parse_bytes(text) - num_bytes) <= max(num_bytes * 0.005, 0)
    assert float(text.split()[0]) < (1024 if binary else 1000) or "P" in text


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with suppress(BadInput):
        assert 0 <= parse_bytes(text) <= MAX_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (1, "1 B", "1 B"),
        (1023, "1023 B", "1.02 kB"),
        (1024, "1.00 KiB", "1.02 kB"),
        (2**20 - 1, "1.00 MiB", "1.05 MB"),
        (6_881_280_000, "6.41 GiB", "6.88 GB"),
        (2**63 - 1, "8192.00 PiB", "9223.37 PB"),
        (-2048, "-2.00 KiB", "-2.05 kB"),
    ],
)
def test_format_bytes(num_bytes: int, binary: str, decimal: str) -> None:
    assert format_bytes(num_bytes) == binary
    assert format_bytes(num_bytes, binary=False) == decimal


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0B"), (6 * 2**30, "6GiB"), (1000, "1000B"), (1536 * 2**20, "1536MiB")])
def test_exact_bytes(num_bytes: int, text: str) -> None:
    assert exact_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 us"),
        (12_345, "12.3 us"),
        (999_900, "1 ms"),
        (4.56e9, "4.56 s"),
        (999.6e6, "1 s"),
        (12_345e9, "12345 s"),
        (-2e6, "-2 ms"),
    ],
)
def test_format_ns(time_ns: float, text: str) -> None:
    assert format_ns(time_ns) == text


def test_format_percent() -> None:
    assert format_percent(0.1234) == "12.34 %"
