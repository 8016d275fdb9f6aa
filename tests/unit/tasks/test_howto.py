"""The how-to page's Python blocks run, one after another, as a reader would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memfit.tasks import parse_tasks

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "schedule-a-task-graph.md"


def test_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block, names)
    assert "OPTIMAL" in capsys.readouterr().out


def test_the_json_is_ours() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert parse_tasks(text).num_tasks == len(json.loads(text)["tasks"]) == 4
