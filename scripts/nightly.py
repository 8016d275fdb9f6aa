"""What breaks on this torch: private symbols that are gone, and tests that fail. `make test-nightly` runs it on the newest torch there is.

python scripts/nightly.py --symbols       only the symbols, in seconds
python scripts/nightly.py                 also the tests of the rooms that know torch from inside
python scripts/nightly.py tests/unit/runtime

Exits 1 where something is broken. A torch that memfit is not tested on is accepted for the run (`probe.accept_untested`): this is how it is tried.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from memfit.torch_private import probe  # noqa: E402

if TYPE_CHECKING:
    from memfit.torch_private.probe import Symbol

SYMBOL_ROOMS = ("torch_private", "compilers")
TESTS = tuple(f"tests/unit/{room}" for room in ("torch_private", "compilers", "capture", "passes", "runtime"))
_LONGEST = 160


@dataclass(slots=True, eq=False)  # pytest keeps its plugins in sets
class Outcomes:
    """A plugin of pytest that keeps what failed, with the last line of the error."""

    ran: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.ran[_room_of(report.nodeid)] += 1
        if report.failed:
            self.failed[report.nodeid] = _last_line(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed[report.nodeid] = _last_line(report)


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    errors = [line.strip() for line in text.splitlines() if line.strip()]
    return (errors[0] if crash is not None else errors[-1])[:_LONGEST] if errors else "no message"


def _room_of(test: str) -> str:
    return "/".join(test.split("::", maxsplit=1)[0].split("/")[:3])


def symbols_asked_for() -> list[Symbol]:
    """Every private symbol of torch that memfit names, found by importing the rooms that may name one."""
    for room in SYMBOL_ROOMS:
        package = importlib.import_module(f"memfit.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"memfit.{room}."):
            importlib.import_module(module.name)
    return list(probe.SYMBOLS.values())


def symbol_lines(symbols: Sequence[Symbol]) -> list[str]:
    """How many there are, and each one that is gone with what it is needed for."""
    gone = [symbol for symbol in symbols if not symbol.is_there]
    lines = [f"private symbols: {len(gone)} of {len(symbols)} are gone"]
    return lines + [f"  {s.path}: needed to {s.need}{' (memfit does without)' if s.optional else ''}" for s in gone]


def test_lines(outcomes: Outcomes) -> list[str]:
    """A line for each room, and below it each test that failed with its error."""
    lines = []
    for room in sorted({*outcomes.ran, *map(_room_of, outcomes.failed)}):
        failed = {test: error for test, error in outcomes.failed.items() if _room_of(test) == room}
        lines.append(f"{room}: {len(failed)} of {outcomes.ran[room]} tests failed")
        lines += [f"  {test.removeprefix(room + '/')}: {error}" for test, error in failed.items()]
    return lines


def pinned() -> str:
    return next(iter(re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)), "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help=f"of pytest; {', '.join(TESTS)} without")
    parser.add_argument("--symbols", action="store_true", help="run no tests")
    options = parser.parse_args()
    import torch

    lines = [f"torch {torch.__version__} (pinned: {pinned()}; memfit is tested on {probe.TESTED})"]
    symbols = symbols_asked_for()
    lines += symbol_lines(symbols)
    broken = any(not symbol.is_there and not symbol.optional for symbol in symbols)
    if not options.symbols:
        import pytest

        probe.accept_untested()
        outcomes = Outcomes()
        code = pytest.main([*(options.tests or TESTS), f"--rootdir={ROOT}", "-p", "no:cacheprovider"], plugins=[outcomes])
        lines += test_lines(outcomes)
        broken = broken or code != 0
    print("\n".join(["", *lines]))
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
