"""The pages under `results/` and the figures of README.md, made from the raw rows: one page per theme, an index, nothing typed by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.figures import compiled_figures, eager_figures, start_figures
from benchmarks.lib.results import FOLDER, ROOT, Row, read_results
from benchmarks.lib.tables import lines_of

HISTORY = FOLDER / "history"
MADE = "*Made by `python scripts/results.py --write` from the raw rows beside it; do not edit.*"
THEMES = {
    "compiled": ("The compiled engine on a GPU", ("compiled", "compiled_bounds", "convolution_algorithms")),
    "eager": ("The eager engine", ("eager", "variants", "reserved", "model_matrix", "losses_inside", "loss_forms", "lengths")),
    "census": ("A census of architectures", ("census",)),
    "planning": (
        "Planners",
        (
            *("planning_published", "planning_models", "against_torch", "planning_variants", "planning_ablation", "planning_stages"),
            *("planning_unseen", "planning_layered", "planning_large", "sliced_blocks", "written_attention"),
        ),
    ),
    "offsets": ("Offsets", ("offsets", "offsets_unseen", "offsets_cold", "offsets_growth", "offsets_captured", "recorded_steps")),
    "chains": ("Chains", ("chain",)),
    "tasks": (
        "Task graphs",
        ("task_speed", "task_statistics", "task_statistics_raw", "task_harpoon", "task_parallel", "task_dags", "dask_memory"),
    ),
    "tape": ("The NumPy engine", ("tape_nets", "tape_depth", "tape_random", "tape_speed", "tape_layers", "tape_attention")),
    "judge": ("The judge", ("judge",)),
    "house": ("The house", ("house",)),
    "guards": ("Guards", ("guard_cost", "situations", "frameworks", "soak")),
}
FACTS = (
    "device",
    "machine",
    "python",
    "torch",
    "cudnn",
    "numpy",
    "scipy",
    "numba",
    "ortools",
    "dask",
    "distributed",
    "pymetis",
    "cvxopt",
    "threads",
)


def write_pages() -> list[Path]:
    """Every page that differs from its data, written anew."""
    changed = stale_pages()
    for path, text in changed.items():
        path.write_text(text)
    return list(changed)


def stale_pages() -> dict[Path, str]:
    """What pages should say, where they say something else."""
    pages = {FOLDER / f"{theme}.md": theme_page(theme) for theme in THEMES} | {FOLDER / "README.md": index()}
    pages |= {path: with_figures(path.read_text()) for path in (ROOT / "README.md", ROOT / "docs" / "how-to" / "compile-a-step.md")}
    return {path: text for path, text in pages.items() if not path.exists() or path.read_text() != text}


def files_of(theme: str) -> list[Path]:
    """The newest file of each measurement of a theme, on each hardware."""
    found = []
    for name in THEMES[theme][1]:
        own = sorted(p for p in FOLDER.glob(f"{name}_*.jsonl") if re.fullmatch(rf"{name}_[a-z0-9-]+_\d{{6}}", p.stem))
        found += list({p.stem.rsplit("_", 1)[0]: p for p in own}.values())
    return found


def theme_page(theme: str) -> str:
    title, _ = THEMES[theme]
    sections = [(path, *read_results(path)) for path in files_of(theme)]
    contents = [f"- [{about['title']}](#{_anchor(about['title'])})" for _, about, _ in sections]
    parts = [f"# {title}", MADE, "\n".join(contents)]
    for path, about, rows in sections:
        parts += [f"## {about['title']}", *([about["text"]] if about["text"] else []), *_picture(path)]
        parts += ["\n".join(lines_of(about, rows)).strip(), *([about["after"]] if "after" in about else []), runs(path, about, rows)]
    return "\n\n".join(parts) + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _picture(path: Path) -> list[str]:
    picture = path.with_suffix(".png")
    return [f"![{path.stem}]({picture.name})"] if picture.exists() else []


def runs(path: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Which commands at which commits made the rows: a table may be of several runs."""
    counted = Counter((row.get("command", "").strip(), row["commit"], _facts(row)) for row in rows)
    lines = [f"Raw rows: [`{path.name}`]({path.name}).", ""]
    for (command, commit, facts), number in counted.items():
        how = f"`{command}` at {commit}" if command else f"at {commit}"
        lines.append(f"- {number} rows {how}{'; ' + facts if facts else ''}")
    return "\n".join(lines)


def _facts(row: Row) -> str:
    return ", ".join(str(row[k]) if k in ("device", "machine") else f"{k} {row[k]}" for k in FACTS if k in row)


def index() -> str:
    lines = ["# Results", "", MADE, "", "| theme | measurements | rows | measured at |", "|---|---|---|---|"]
    for theme, (title, _) in THEMES.items():
        read = [read_results(path) for path in files_of(theme)]
        commits = dict.fromkeys(row["commit"] for _, rows in read for row in rows)
        names = "; ".join(f"[{about['title']}]({theme}.md#{_anchor(about['title'])})" for about, _ in read)
        lines.append(f"| [{title}]({theme}.md) | {names} | {sum(len(rows) for _, rows in read)} | {', '.join(commits)} |")
    lines += [
        "",
        "Beside each page lie its raw rows, JSON lines named `<measurement>_<hardware>_<yyyymm>.jsonl`. The first line says how they are shown, every",
        "other one is a row with its commit. Lost comparisons, time-outs and what did not fit stay in the tables. Commands are as they were typed at",
        "that commit: scripts have other names since (`make bench` lists them). `added in` stands where the machine that measured knew no",
        "commit: the rows came into the repository with that one.",
        "",
        "Earlier generations, outdone or withdrawn since:",
        "",
        *(f"- [{_heading(path)}](history/{path.name})" for path in sorted(HISTORY.glob("*.md"), key=_age)),
    ]
    return "\n".join(lines) + "\n"


def _heading(path: Path) -> str:
    return f"{path.stem}: {path.read_text().split(chr(10), 1)[0].removeprefix('# ')}"


def _age(path: Path) -> int:
    """Newest first."""
    order = ("tenth", "ninth", "eighth", "sixth", "fifth", "all", "again")
    return next((k for k, word in enumerate(order) if f"_{word}_" in path.name), len(order))


def with_figures(text: str) -> str:
    """A page with what stands between `<!-- figures: NAME -->` and `<!-- end -->` made anew."""
    figures = {"compiled": compiled_figures, "starts": start_figures, "eager": eager_figures}

    def replaced(found: re.Match[str]) -> str:
        name = found[1]
        file = {"compiled": "compiled", "starts": "compiled", "eager": "eager"}[name]
        _, rows = read_results(next(FOLDER.glob(f"{file}_h200_*.jsonl")))
        return f"<!-- figures: {name} -->\n{figures[name](rows)}\n<!-- end -->"

    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)
