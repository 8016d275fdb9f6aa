"""Kernels: compiled once for all numbers, anew when any kernel's file changes, and also where nothing can be cached."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from numba.core import caching

from memfit.jit.kernel import is_cached, kernel

SOURCE = Path(__file__).parents[3] / "src"


def test_one_version_for_literal_and_other_numbers(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # what comes from a cache says nothing of how often it was compiled

    def doubled_plus(values, number):  # type: ignore[no-untyped-def]
        return values[0] * 2 + number

    inner = kernel(doubled_plus)

    def with_and_without_a_literal(values, number):  # type: ignore[no-untyped-def]
        return inner(values, 0) + inner(values, number) + inner(values, number=5)

    assert kernel(with_and_without_a_literal)(np.array([3]), 7) == 6 + 13 + 11
    assert len(inner.compiled.overloads) == 1  # type: ignore[attr-defined]


def test_where_nothing_can_be_written_kernels_are_compiled_all_the_same(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def tripled(x: int) -> int:
        return 3 * x

    homeless = kernel(tripled)
    assert homeless(4) == 12
    assert is_cached(homeless)


_PROGRAM = "from memfit.planning.model.fast_judge import measure; from memfit.jit.kernel import is_cached; print(is_cached(measure))"
_COMPILE = "from memfit.planning.jit.warm_up import _small_problem; from memfit.planning.model.fast_judge import peak_and_time; import numpy as np; "
_COMPILE += "m = _small_problem().model; peak_and_time(m.arrays, np.array(m.agenda)); " + _PROGRAM


def test_a_change_in_another_file_with_kernels_is_noticed(tmp_path: Path) -> None:
    """What a kernel calls is compiled into it, so its own file says too little."""
    shutil.copytree(SOURCE / "memfit", tmp_path / "memfit", ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def said(program: str) -> str:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True).stdout.strip()

    assert said(_PROGRAM) == "False"
    assert said(_COMPILE) == "True"
    assert said(_PROGRAM) == "True"
    changed = tmp_path / "memfit" / "planning" / "model" / "inplace_forms.py"
    changed.write_text(changed.read_text() + "\n# another line\n")
    assert said(_PROGRAM) == "False"
    unrelated = tmp_path / "memfit" / "planning" / "api.py"
    assert said(_COMPILE) == "True"
    unrelated.write_text(unrelated.read_text() + "\n# another line\n")
    assert said(_PROGRAM) == "True"
