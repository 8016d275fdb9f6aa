"""`scripts/nightly.py` says which private symbols of torch are gone and which tests fail."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from memfit.torch_private.probe import SYMBOLS, Symbol

SCRIPT = Path(__file__).parents[2] / "scripts" / "nightly.py"
NIGHTLY = runpy.run_path(str(SCRIPT))


def test_symbols_that_are_gone_are_named_with_their_need() -> None:
    here, gone = Symbol("torch.nn.Module", "have modules"), Symbol("torch._no_such_thing", "test this", optional=True)
    for symbol in (here, gone):
        del SYMBOLS[symbol.path]
    assert NIGHTLY["symbol_lines"]([here, gone]) == [
        "private symbols: 1 of 2 are gone",
        "  torch._no_such_thing: needed to test this (memfit does without)",
    ]


def test_every_symbol_that_a_room_names_is_probed() -> None:
    paths = {symbol.path for symbol in NIGHTLY["symbols_asked_for"]()}
    assert {"torch._inductor.config", "torch.utils._pytree.tree_map"} <= paths


def test_failed_tests_stand_under_their_room_with_their_error() -> None:
    outcomes = NIGHTLY["Outcomes"]()
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="AttributeError: no _x\nmore"))
    for number, failed in enumerate((False, True)):
        report = SimpleNamespace(nodeid=f"tests/unit/capture/test_a.py::test_{number}", when="call", failed=failed, longrepr=crash)
        outcomes.pytest_runtest_logreport(report)
    outcomes.pytest_collectreport(SimpleNamespace(nodeid="tests/unit/runtime/test_b.py", failed=True, longrepr="lines\nImportError: gone"))
    assert NIGHTLY["test_lines"](outcomes) == [
        "tests/unit/capture: 1 of 2 tests failed",
        "  test_a.py::test_1: AttributeError: no _x",
        "tests/unit/runtime: 1 of 0 tests failed",
        "  test_b.py: ImportError: gone",
    ]


def test_a_failing_test_is_told_and_makes_the_script_fail(tmp_path: Path) -> None:
    test = tmp_path / "test_two.py"
    test.write_text("def test_fine():\n    pass\n\ndef test_broken():\n    raise ValueError('torch is not what it was')\n")
    done = subprocess.run([sys.executable, SCRIPT, test], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 of 2 tests failed" in done.stdout
    assert "test_broken: ValueError: torch is not what it was" in done.stdout.splitlines()[-1]
