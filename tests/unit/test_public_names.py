"""The public door: every name it lists opens, and unknown ones say so."""

from __future__ import annotations

import pytest

import memfit
import memfit.core


@pytest.mark.parametrize("name", sorted(set(memfit.core.__all__) & set(memfit.__all__)))
def test_core_names_are_the_cores_own(name: str) -> None:
    assert getattr(memfit, name) is getattr(memfit.core, name)


def test_every_listed_name_has_a_home_and_is_listed_once() -> None:
    assert set(memfit.__all__) <= set(dir(memfit))
    assert len(memfit.__all__) == len(set(memfit.__all__))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'banana'"):
        memfit.banana  # noqa: B018


def test_the_core_exports_what_it_lists() -> None:
    assert sorted(memfit.core.__all__, key=str.lower) == sorted(set(memfit.core.__all__), key=str.lower)
    for name in memfit.core.__all__:
        assert hasattr(memfit.core, name)
