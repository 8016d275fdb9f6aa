"""Pages under benchmarks/results and README's figures say what the raw rows say, and every row says which commit it is from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.lib.figures import at, fastest, ours
from benchmarks.lib.pages import HISTORY, THEMES, files_of, stale_pages, with_figures
from benchmarks.lib.results import FOLDER, read_results

FILES = [path for theme in THEMES for path in files_of(theme)]


def test_every_page_is_as_the_rows_say() -> None:
    stale = [str(page.name) for page in stale_pages()]
    assert not stale, f"{', '.join(stale)} differ from the raw rows; write them again with: python scripts/results.py --write"


def test_every_file_of_rows_is_shown_on_a_page() -> None:
    assert sorted(FOLDER.glob("*.jsonl")) == sorted(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_row_has_a_commit(path: Path) -> None:
    about, rows = read_results(path)
    assert about["title"]
    assert rows
    assert all(row["commit"] for row in rows)


@pytest.mark.parametrize("page", [*FOLDER.glob("*.md"), *HISTORY.glob("*.md")], ids=lambda p: p.stem)
def test_links_of_results_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_figures_are_made_anew_between_their_marks() -> None:
    text = "before\n<!-- figures: eager -->\nold\n<!-- end -->\nafter"
    made = with_figures(text)
    assert made.startswith("before\n<!-- figures: eager -->\n| model |")
    assert made.endswith("|\n<!-- end -->\nafter")
    assert with_figures(made) == made


def test_figures_leave_out_peaks_above_the_budget_and_prefer_less_memory_of_equals() -> None:
    base = {"what": "compile", "ms": 100.0, "peak_bytes": 1000}
    above = {"what": "memfit 100%", "ms": 80.0, "peak_bytes": 1001, "budget_bytes": 1000}
    small = {"what": "memfit 100%", "ms": 90.4, "peak_bytes": 700, "budget_bytes": 1000}
    large = {"what": "memfit 100%, replayed", "ms": 90.1, "peak_bytes": 900, "budget_bytes": 1000}
    rows = [base, above, small, large]
    assert ours(rows) == [small, large]
    assert at(rows, 1000) is small
    assert fastest([large], base) is large
