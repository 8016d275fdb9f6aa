"""Snippets of the pages run as they stand, top to bottom, one namespace and one folder per page.

A `python` block whose first line is `# name.py` is written to that file; `sh` lines of the training pages that begin with `memfit` are run. A
`text` block right after a `python` block is what it must print; `console` blocks are examples of output that varies.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from memfit.cli import main

DOCS = Path(__file__).parents[2] / "docs"
RUNNABLE = (
    "tutorial/first-steps.md",
    "how-to/judge-a-schedule.md",
    "reference/file-formats.md",
    "how-to/use-the-numpy-engine.md",
    "how-to/pack-buffers.md",
    "how-to/plan-a-graph.md",
)
TRAINING = (
    "../README.md",
    "tutorial/train-inside-a-budget.md",
    "how-to/estimate-memory.md",
    "how-to/fit-a-model.md",
    "how-to/when-a-budget-is-refused.md",
    "how-to/adapters-and-several-models.md",
    "how-to/accumulate-gradients.md",
    "how-to/torch-compile-backend.md",
    "how-to/save-and-reuse-plans.md",
    "how-to/choose-a-budget.md",
    "reference/python-api.md",
    "reference/devices.md",
    "explanation/how-fit-works.md",
)
_BLOCK = re.compile(r"```(python|sh)\n(.*?)```(?:\s*\n```text\n(.*?)```)?", re.DOTALL)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, importing from there; what it imported is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net", raising=False)


@pytest.mark.parametrize("name", RUNNABLE)
def test_snippets_run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page(name, capsys, monkeypatch)


@pytest.mark.parametrize("name", TRAINING)
def test_training_snippets_run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    _run_page(name, capsys, monkeypatch)


def test_dask_snippets_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    _run_page("how-to/dask-inside-a-memory-bound.md", capsys, monkeypatch)


@pytest.mark.slow
def test_compiled_snippets_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    _run_page("how-to/compile-a-step.md", capsys, monkeypatch)


def test_a_real_trainer_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "accelerate")):
        pytest.skip("needs torch, transformers and accelerate")
    import torch
    from benchmarks.models.torchvision_ops import declare_missing_ops

    torch.set_num_threads(1)
    declare_missing_ops()
    printed = _run_page("how-to/hugging-face-trainer.md", capsys, monkeypatch)
    assert "shapes: 1  inside: True" in printed


def _run_page(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    blocks = _BLOCK.findall((DOCS / name).read_text())
    assert any(language == "python" for language, _, _ in blocks)
    namespace: dict[str, object] = {}
    printed = ""
    for language, code, expected in blocks:
        file = re.match(r"# (\w+\.py)\n", code)
        if language == "sh":
            if name in TRAINING:
                _run_commands(code, monkeypatch)
        elif file:
            Path(file[1]).write_text(code)
        else:
            exec(compile(code, f"{name} snippet", "exec"), namespace)
        printed = capsys.readouterr().out
        if expected:
            assert printed == expected
    return printed


def _run_commands(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in code.splitlines():
        if line.startswith("memfit "):
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            exit_code = _exit_code()
            assert exit_code == 0, f"{line}: exit {exit_code}"


def _exit_code() -> int:
    try:
        main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0
