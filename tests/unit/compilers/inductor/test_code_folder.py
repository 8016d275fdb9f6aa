"""Where compiled code lies, and what happens where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memfit.compilers.inductor.code_folder import code_folder, with_room
from memfit.core import cache_folder as module
from memfit.core.cache_folder import CacheWarning, last_resort

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def _warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module._warn.cache_clear()
    monkeypatch.setenv(NAME, "")  # so that what code_folder writes is taken back
    monkeypatch.delenv(NAME)


def test_a_folder_of_the_users_choice_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, str(tmp_path / "new"))
    assert code_folder() == tmp_path / "new"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_without_one_it_lies_in_memfits_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_chosen", [tmp_path])
    assert code_folder() == tmp_path / "inductor" == Path(os.environ[NAME])


def test_a_folder_that_cannot_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(NAME, str(tmp_path / "file" / "inside"))
    with pytest.warns(CacheWarning, match=f"compiled code cannot be kept in .*{NAME}"):
        assert code_folder() == last_resort() / "inductor"
    assert Path(os.environ[NAME]).is_dir()


def test_compiling_begins_again_where_the_disk_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, str(tmp_path))
    tried: list[str] = []

    def compile_code() -> str:
        tried.append(os.environ[NAME])
        if tried[-1] == str(tmp_path):
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                raise RuntimeError("Inductor's own error around it") from error
        return "code"

    with pytest.warns(CacheWarning, match="No space left on device"):
        assert with_room(compile_code) == "code"
    assert tried == [str(tmp_path), str(last_resort() / "inductor")]


def test_other_errors_are_not_about_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, str(tmp_path))
    tried: list[int] = []

    def compile_code() -> None:
        tried.append(1)
        raise ValueError("no such op")

    with pytest.raises(ValueError, match="no such op"):
        with_room(compile_code)
    assert tried == [1]
