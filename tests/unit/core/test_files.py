"""Files are written whole or not at all, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.core.errors import BadInput
from memfit.core.files import write_text, write_whole


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path, sync: bool) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")
    with write_whole(target, sync=sync) as file:
        file.write(b"new")
        file.flush()
        assert target.read_text() == "old"
        assert len(list(tmp_path.glob(".memfit-*.tmp"))) == 1
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")
    with pytest.raises(error), write_whole(target):
        raise error
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_user_s_file_is_refused_in_one_line(tmp_path: Path) -> None:
    write_text("text", tmp_path / "a")
    with pytest.raises(BadInput, match="pass --force"):
        write_text("other", tmp_path / "a")
    write_text(b"other", tmp_path / "a", force=True)
    assert (tmp_path / "a").read_text() == "other"
