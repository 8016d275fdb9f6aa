"""Tests keep costs and plans in a folder of their own, compiled code in one that all runs of the tests share.

Every rewrite of a step is looked at by `passes/check.py`."""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.core.cache_folder import use_cache_folder
from memfit.passes.check import check_rewritten
from memfit.passes.run import watch_passes


@pytest.fixture(scope="session", autouse=True)
def measurements_in_a_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use_cache_folder(tmp_path_factory.mktemp("measurements"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"memfit-tests-{getpass.getuser()}"))
    yield
    use_cache_folder(None)


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
