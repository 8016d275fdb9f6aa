"""`import memfit` loads no heavy room."""

from __future__ import annotations

import subprocess
import sys


def test_import_memfit_loads_nothing_heavy() -> None:
    code = "import sys, memfit; print([m for m in ('torch', 'scipy', 'numba', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
