"""Keys of Python values: by value where there is one, else by identity with a reference held."""

from __future__ import annotations

import enum
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from memfit.capture.guards.values import Same, is_plain, value_key
from memfit.capture.inputs import Call


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    gain: float


class Thing:
    pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ("a", "b"),
        (None, 0),
        (Colour.RED, Colour.BLUE),
        (torch.float32, torch.float64),
        ((1, 2.0), (1, -2.0)),
        ({1, 2}, {1, 3}),
        (np.ones(2), np.ones(3)),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        (Settings(1.0), Settings(2.0)),
        (slice(1, 2), slice(1, 3)),
    ],
)
def test_different_values_have_different_keys(one: Any, other: Any) -> None:
    assert value_key(one) != value_key(other)


@pytest.mark.parametrize(
    "make", [lambda: float("nan"), lambda: "".join(["a", "b"]), lambda: np.ones(2), lambda: Settings(1.0), lambda: (1, 2)]
)
def test_equal_values_have_equal_keys(make: Any) -> None:
    assert value_key(make()) == value_key(make())
    assert hash(value_key(make())) == hash(value_key(make()))


def test_an_object_without_a_value_is_known_by_itself_and_held() -> None:
    thing = Thing()
    alive = weakref.ref(thing)
    key = value_key(thing)
    assert key == value_key(thing)
    assert key != value_key(Thing())
    del thing
    gc.collect()
    assert alive() is not None  # nobody else gets its address
    assert isinstance(key[1], Same)


def test_objects_whose_values_are_guarded_are_a_type_in_the_key_of_a_shape() -> None:
    one, other = (Call.flatten((torch.ones(2), Thing()), {}) for _ in range(2))
    assert one.shape_key() == other.shape_key()
    assert one.key() != other.key()
    assert Call.flatten((0.0,), {}).shape_key() != Call.flatten((-0.0,), {}).shape_key()
    assert not is_plain(Thing())
