"""The docs keep up: every command is in the CLI reference, every requirement in the status, every link leads somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
from functools import cache, reduce
from pathlib import Path

import pytest
import typer.main

from memfit.cli import app
from memfit.core import io
from memfit.profile import devices

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PASSES = runpy.run_path(str(ROOT / "scripts" / "pass_table.py"))
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))
NUM_REQUIREMENTS = 27


def test_the_table_of_passes_is_the_pipeline() -> None:
    page = PASSES["PAGE"].read_text()
    assert PASSES["insert"](page) == page, f"run: {PASSES['REGENERATE']}"


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


NAMED = [page for page in PAGES if page.name != "CHANGELOG.md"]
WIDTH = 140
FILE_FORMATS = {f"memfit.{name}" for name, _, _ in io._FORMATS.values()}


def _resolves(name: str) -> bool:
    """A module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return reduce(lambda o, part: getattr(o, part, None), parts[length:], found) is not None
    return False


@cache
def _sources() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("page", NAMED, ids=lambda p: str(p.relative_to(ROOT)))
def test_dotted_names_exist(page: Path) -> None:
    """`memfit.x.y` is a module or what is in one; or an op, or a file format, by its name in the source."""
    for name in set(re.findall(r"(?<![\w/.-])memfit(?:\.[A-Za-z_]\w*)+", page.read_text())):
        known = name in FILE_FORMATS or f'"{name}"' in _sources()
        assert known or _resolves(name), f"{page.name} names {name}, which is not there"


@pytest.mark.parametrize("page", NAMED, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    """Files and folders, from the top of the repository, from src/memfit or from tests."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # links have their own test
    files = re.findall(r"(?<![\w/.*~<-])((?:[\w-]+/)+[\w*-]+\.(?:py|md|jsonl|c|cpp|toml|json|csv))", text)
    folders = re.findall(r"(?<![\w/.*~<-])((?:[a-z_]+/)+)(?![\w*<{])", text)
    for path in {*files, *folders}:
        assert any((root / path).exists() for root in (ROOT, ROOT / "src" / "memfit", ROOT / "tests", DOCS)), (
            f"{page.name} names {path}, which is not there"
        )


@pytest.mark.parametrize("page", [p for p in NAMED if "explanation" in p.parts or p.name == "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_source_files_named_alone_exist(page: Path) -> None:
    known = {path.name for folder in ("src", "tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")}
    for name in set(re.findall(r"`(\w+\.py)`", page.read_text())):
        assert name in known, f"{page.name} names {name}, which is not there"


@pytest.mark.parametrize("page", [p for p in NAMED if p.name != "cli.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_fit_a_screen(page: Path) -> None:
    """But for tables, code and links."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code and not line.startswith(("|", "![", "    ")) and "](http" not in line:
            assert len(line) <= WIDTH, f"{page.name}:{number} has {len(line)} characters: {line[:60]}..."


def test_the_page_of_devices_is_the_table() -> None:
    columns = (r"([\w-]+)", r"(\d+) GiB", r"([\d.]+) ([TG])B/s", r"(\d+) ([TG])FLOP/s", r"(\d+) ([TG])FLOP/s", r"(\d+) GB/s")
    rows = re.findall(rf"^\| {' [|] '.join(columns)} \|$", (DOCS / "reference" / "devices.md").read_text(), re.MULTILINE)
    scale = {"T": 1e12, "G": 1e9}
    stated = {
        name: (int(gib) * 2**30, float(speed) * scale[a], float(fp32) * scale[b], float(half) * scale[c], float(link) * 1e9)
        for name, gib, speed, a, fp32, b, half, c, link in rows
    }
    known = {
        d.name: (d.memory_bytes, d.memory_bytes_per_s, d.fp32_flops, d.half_flops, d.link_bytes_per_s) for d in devices.DEVICES.values()
    }
    assert stated == {name: pytest.approx(figures) for name, figures in known.items()}
