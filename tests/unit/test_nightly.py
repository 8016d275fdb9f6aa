"""`scripts/nightly.py` says which private symbols of torch are gone and which tests fail."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

from memfit.torch_private.probe import SYMBOLS, Symbol

NIGHTLY = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "nightly.py"))


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
