"""20,000 damaged files, every artifact kind: each is a valid artifact or one BadInput line, never another exception."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from tests import strategies as some
from tests.unit.core.test_io import artifacts_of

from memfit.core.errors import BadInput
from memfit.core.io import dumps, loads

NUM_MUTATIONS = 20_000
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 5, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e300, 1e308),
    *("", "x", "memfit.graph", "parameter", "compute", "\ud800", "\x00\n\x1b", "a" * 500, [], {}, [[]], [{}], {"": None}),
    *([0] * 50, [None, None, None], [["compute", 0, 0]], {"format": "memfit.plan"}, float("nan"), float("inf")),
)
BOMBS = (
    *("[" * 3000 + "]" * 3000, '{"a":' * 2000 + "1" + "}" * 2000, "[" * 100_000),
    *("9" * 4400, "-" + "9" * 4000, "NaN", "1e400"),
)


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a JSON value, as a path of keys."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))]


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def _swap_values(rng: Random, text: str) -> str:
    """Replace, remove, copy or rename parts of the JSON value, keeping it JSON."""
    data = json.loads(text)
    if rng.random() < 0.5:
        data.pop("digest", None)  # it is optional, and would catch every change to a graph before anything else looks
    for _ in range(rng.randint(1, 3)):
        places = [p for p in _places(data) if p]
        if not places:
            break
        place = rng.choice(places)
        holder, key = _at(data, place[:-1]), place[-1]
        edit = rng.choice(("odd", "odd", "remove", "copy", "rename", "nudge"))
        if edit == "odd":
            holder[key] = deepcopy(rng.choice(ODD_VALUES))
        elif edit == "remove":
            del holder[key]
        elif edit == "copy":
            holder[key] = deepcopy(_at(data, rng.choice(places)))
        elif edit == "rename" and isinstance(holder, dict):
            holder[rng.choice(("", "banana", "size_bytes", "version"))] = holder.pop(key)
        elif isinstance(holder[key], (int, float)):
            holder[key] += rng.choice((-1, 1))
    return json.dumps(data)


def _damage_bytes(rng: Random, text: str) -> bytes:
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        edit = rng.choice(("flip", "flip", "delete", "insert", "truncate", "double"))
        if edit == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif edit == "delete":
            del data[at : at + rng.randint(1, 8)]
        elif edit == "insert":
            data[at:at] = rng.choice((b"{", b"}", b"[", b"]", b",", b'"', b"\x00", b"\xff", b"NaN", b"-Infinity", b"1e999", b"9" * 5000))
        elif edit == "truncate" and rng.random() < 0.3:
            del data[at:]
        elif edit == "double":
            data[at:at] = data[at : at + rng.randint(1, 40)]
    return bytes(data)


def _spoil_syntax(rng: Random, text: str) -> str:
    """Deep nesting, duplicate keys and huge numbers in place of a value."""
    data = json.loads(text)
    key = rng.choice(list(data))
    bomb = rng.choice(BOMBS)
    rest = {k: v for k, v in data.items() if k != key}
    twice = f'"{rng.choice(list(data))}": 1, ' if rng.random() < 0.3 else ""
    return "{" + twice + f'"{key}": {bomb}, ' + json.dumps(rest)[1:]


def _check(text: str | bytes) -> bool:
    """Whether it was still valid; anything but a valid artifact or one BadInput line fails the test."""
    try:
        artifact = loads(text, source="fuzz.json")
    except BadInput as refusal:
        message = str(refusal)
        assert message.isprintable()
        assert len(message) < 500, message
        return False
    assert loads(dumps(artifact)) == artifact
    return True


@pytest.mark.parametrize("block", range(8))
def test_damaged_files_are_refused_or_valid(block: int) -> None:
    originals = [dumps(x) for seed in range(12) for x in artifacts_of(some.random_case(Random(seed), max_steps=12))]
    valid = 0
    for seed in range(block * NUM_MUTATIONS // 8, (block + 1) * NUM_MUTATIONS // 8):
        rng = Random(seed)
        text = rng.choice(originals)
        draw = rng.random()
        damaged = _damage_bytes(rng, text) if draw < 0.4 else _swap_values(rng, text) if draw < 0.9 else _spoil_syntax(rng, text)
        try:
            valid += _check(damaged)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert 0 < valid < NUM_MUTATIONS // 8, "some damage must go unnoticed and most must not"
