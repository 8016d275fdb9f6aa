"""The docs keep up: every command is in the CLI reference, every requirement in the status, every link leads somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import typer.main

from memfit.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))
NUM_REQUIREMENTS = 27


def test_the_cli_reference_is_fresh() -> None:
    stale = REFERENCE["PAGE"].read_text() != REFERENCE["render"]()
    assert not stale, f"docs/reference/cli.md is stale; regenerate it with: {REFERENCE['REGENERATE']}"


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]
def test_every_command_is_documented(name: str) -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    assert f"## memfit {name}\n" in text, f"document `memfit {name}` with: {REFERENCE['REGENERATE']}"


def test_status_has_a_row_for_every_requirement() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|([^|]*)\|$", (DOCS / "status.md").read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, NUM_REQUIREMENTS + 1))
    for number, _, state, evidence in rows:
        assert state.strip() in ("works", "partly", "not yet"), f"row {number}: {state!r} is not works, partly or not yet"
        assert state.strip() == "not yet" or "`" in evidence, f"row {number} says {state.strip()} but names no test"


def test_tests_named_in_the_status_exist() -> None:
    for path in re.findall(r"`((?:tests|benchmarks)/[^`:]+)", (DOCS / "status.md").read_text()):
        assert (ROOT / path).exists(), f"docs/status.md names {path}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    missing = [
        name for page in sorted(DOCS.rglob("*.md")) if (name := page.relative_to(DOCS).as_posix()) not in index and name != "index.md"
    ]
    assert not missing, f"docs/index.md does not lead to {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_name_no_machine_paths(page: Path) -> None:
    found = re.search(r"(?<![\w.])/(work|root|home)/\w+", page.read_text())
    assert found is None, f"{page.name} names a path of one machine: {found}"
