"""Tests keep their measurements in a folder of their own, not in the home folder; every rewrite of a step is looked at by `passes/check.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from memfit.passes.check import check_rewritten
from memfit.passes.run import watch_passes
from memfit.profile.cache import use_folder


@pytest.fixture(scope="session", autouse=True)
def measurements_in_a_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use_folder(tmp_path_factory.mktemp("measurements"))
    yield
    use_folder(None)


@pytest.fixture(scope="session", autouse=True)
def passes_are_checked() -> Iterator[None]:
    with watch_passes(check_rewritten):
        yield


@pytest.fixture(autouse=True)
def each_test_chooses_accelerates_precision() -> Iterator[None]:
    """accelerate keeps the first one asked for as long as the process lives, and refuses another."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
