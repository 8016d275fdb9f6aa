"""Tests keep their measurements in a folder of their own, not in the home folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memfit.profile.cache import use_folder


@pytest.fixture(scope="session", autouse=True)
def measurements_in_a_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use_folder(tmp_path_factory.mktemp("measurements"))
    yield
    use_folder(None)
