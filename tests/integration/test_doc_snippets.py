"""Python snippets of the core's pages run as they stand, top to bottom, one namespace per page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RUNNABLE = (
    "tutorial/first-steps.md",
    "how-to/judge-a-schedule.md",
    "reference/file-formats.md",
    "how-to/use-the-numpy-engine.md",
    "how-to/pack-buffers.md",
)


@pytest.mark.parametrize("name", RUNNABLE)
def test_snippets_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / name).read_text()
    blocks = re.findall(r"```python\n(.*?)```(?:\s*\n```text\n(.*?)```)?", text, re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for code, expected in blocks:
        exec(compile(code, f"{name} snippet", "exec"), namespace)
        printed = capsys.readouterr().out
        if expected:
            assert printed == expected
