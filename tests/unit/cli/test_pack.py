"""`memfit pack`: the fields the issue promises, the exit codes, the files it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.models.offset_instances import cut_anywhere
from typer.testing import CliRunner

from memfit.cli import app, main
from memfit.cli.pack import _subtract_spent_s
from memfit.core.packing import check_packing
from memfit.offsets import read_buffers

GOOD = "id,lower,upper,size\na,0,4,8\nb,2,6,8\nc,4,8,8\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(GOOD)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Through `main`, which turns errors into exit codes."""
    monkeypatch.setattr("sys.argv", ["memfit", "pack", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)  # type: ignore[arg-type]


def test_json_has_the_promised_fields(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, file, "--capacity", "16", "--time-limit", "5", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert {"status", "height", "lower_bound", "offsets", "seconds"} <= set(data)
    assert (data["status"], data["height"], data["lower_bound"]) == ("OPTIMAL", 16, 16)
    check_packing(read_buffers(file), [data["offsets"][k] for k in "abc"], height=16)


def test_proven_impossible_exits_3_after_its_json(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, file, "--capacity", "15", "--json") == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "INFEASIBLE"
    assert "16 bytes, 1 above the capacity of 15" in captured.err


def test_out_of_time_exits_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    buffers, capacity = cut_anywhere(200, 8)
    path = tmp_path / "hard.csv"
    path.write_text("id,lower,upper,size\n" + "".join(f"{b.id},{b.start},{b.stop},{b.size}\n" for b in buffers))
    assert run(monkeypatch, path, "--capacity", capacity, "--time-limit", "0", "--json") == 4
    assert json.loads(capsys.readouterr().out)["status"] == "UNKNOWN"


def test_writes_offsets_and_a_picture_and_refuses_to_overwrite(file: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "offsets.csv", tmp_path / "packing.png"
    result = CliRunner().invoke(app, ["pack", str(file), "-o", str(out), "--png", str(png)])
    assert result.exit_code == 0
    assert f"Wrote {out}" in result.stderr
    assert f"Wrote {png}" in result.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    placed = read_buffers(out)  # the offsets are read back as fixed ones
    check_packing(placed, [b.offset or 0 for b in placed], height=16)
    again = CliRunner().invoke(app, ["pack", str(file), "-o", str(out)])
    assert again.exit_code == 1
    assert CliRunner().invoke(app, ["pack", str(file), "-o", str(out), "--force"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("id,lower,size\n", "no column upper"),
        ("id,lower,upper,size\na,0,4\n", "row 2: size ''"),
        ("id,lower,upper,size\na,0,4,banana\n", "banana"),
        ("id,lower,upper,size\na,0,4,1e99\n", "1e99"),
        ("id,lower,upper,size\na,4,0,1\n", "before it starts"),
        ("id,lower,upper,size\na,0,4,-1\n", "sizes and offsets start at 0"),
        ("id,lower,upper,size\na,0,4,1\na,0,4,1\n", "appears twice"),
        ("id,lower,upper,size\n,0,4,1\n", "has no id"),
        ("id,lower,upper,size\na,0,4," + "9" * 30 + "\n", "at most 19 digits"),
        ("id,lower,upper,size\na,0,4,٣\n", "not a whole number"),
        ("\x00\x01", "no column|not a CSV"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert run(monkeypatch, path) == 1
    error = capsys.readouterr().err
    assert pytest.importorskip("re").search(message, error), error
    assert len(error.strip().splitlines()) == 1


def test_loading_counts_towards_the_limit() -> None:
    assert _subtract_spent_s(30.0, 4.0) == 25.0
    assert _subtract_spent_s(2.0, 8.0) == 0.5
    assert _subtract_spent_s(0.1, 8.0) == 0.1
    assert _subtract_spent_s(0.0, 8.0) == 0.0


def test_a_missing_folder_is_refused_before_the_search(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, file, "-o", tmp_path / "nowhere" / "offsets.csv") == 1
    captured = capsys.readouterr()
    assert "there is no folder" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [("--capacity", "banana"), ("--capacity", "-1"), ("--time-limit", "-1"), ("--time-limit", "nan")])
def test_bad_options_are_refused(file: Path, arguments: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, file, *arguments) == 1


def test_an_empty_table_is_a_packing_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.csv"
    path.write_text("id,lower,upper,size\n")
    assert run(monkeypatch, path, "--json", "--capacity", "0") == 0
    assert json.loads(capsys.readouterr().out)["offsets"] == {}


def test_extra_columns_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("id,start,end,size,alignment,offset,arena\na,0,4,8,16,32,1\nb,0,4,8,,,\n")
    a, b = read_buffers(path)
    assert (a.alignment, a.offset, a.arena) == (16, 32, 1)
    assert (b.alignment, b.offset, b.arena) == (1, None, 0)
