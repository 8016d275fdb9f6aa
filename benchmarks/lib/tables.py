"""Rows as Markdown, one function per kind of table; every line of a table ends with the commit it was measured at."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median_high
from typing import Any

from benchmarks.lib.results import Row
from benchmarks.parts.compiled import table as compiled_table

About = Mapping[str, Any]
GIB = 2**30
PACKAGES = ("memfit", "checkpoint-schedules", "pyrevolve")
WITHIN_S = (0.3, 1, 3, 10, 30)
WORTH_SHOWING_MIB = 16
ALLOCATORS = {"default": "caching, as it comes", "expandable": "expandable segments", "arena": "memfit's planned arena"}


def lines_of(about: About, rows: Sequence[Row]) -> list[str]:
    """The rows as the file's `about` asks for."""
    return TABLES[about.get("table", "columns")](about, rows)


def grid(columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(map(str, line)) + " |" for line in cells]


def plain(about: About, rows: Sequence[Row]) -> list[str]:
    columns = [c for c in about["columns"] if c != "commit"] + ["commit"]
    return grid(columns, [[row[c] for c in columns] for row in rows])


def raw(about: About, rows: Sequence[Row]) -> list[str]:
    return [f"{len(rows)} raw rows, not shown here."]


def compiled(about: About, rows: Sequence[Row]) -> list[str]:
    models = compiled_table.by_model(list(rows))
    parts = [compiled_table.summary(models), compiled_table.summary(models, ", replayed"), compiled_table.starts(models)]
    parts += [compiled_table.exactness(models), *(compiled_table.section(name, own) for name, own in models.items())]
    runs = [f"- `{name}`: {what}" for name, what in about["runs"].items()]
    return ["Which lease a row is from (`run`):", "", *runs, "", "\n\n".join(parts)]


def bounds(about: About, rows: Sequence[Row]) -> list[str]:
    columns = (
        "model",
        "GiB",
        "torch.compile, ms",
        "keep all",
        "plan",
        "bound",
        "plan, x torch.compile",
        "bound, x torch.compile",
        "commit",
    )
    cells = []
    for r in rows:
        best = min(r["compile_ms"])
        times = [f"{r[k] / 1e6:.1f}" if r[k] else "infeasible" for k in ("keep_all_ns", "plan_ns", "bound_ns")]
        ratios = [f"{r[k] / 1e6 / best:.3f}" if r["plan_ns"] else "" for k in ("plan_ns", "bound_ns")]
        cells.append([r["model"], f"{r['budget_bytes'] / GIB:.2f}", f"{best:.1f}", *times, *ratios, r["commit"]])
    return grid(columns, cells)


def eager(about: About, rows: Sequence[Row]) -> list[str]:
    """A line per measured point; a second one of the same name is the closed loop's tighter plan."""
    columns = ("model", "what", "ms", "x eager", "GiB measured", "GiB predicted", "GiB budget", "worst gradient difference", "commit")
    base = {r["model"]: r["ms"] for r in rows if r["what"] == "eager" and "ms" in r}
    cells = []
    for r in rows:
        if "ms" not in r:
            said = f"{r.get('status', '')} {r.get('reason') or r.get('error', '')}"
            cells.append([r["model"], r["what"], said, *[""] * 5, r["commit"]])
            continue
        gib = [f"{r[k] / GIB:.2f}" if 0 < r.get(k, 0) < 2**49 else "" for k in ("peak_bytes", "predicted_peak_bytes", "budget_bytes")]
        difference = r.get("worst_gradient_difference")
        shown = "" if difference is None else "0 (bitwise)" if difference == 0 else f"{difference:.1e}"
        cells.append([r["model"], r["what"], f"{r['ms']:.1f}", f"{r['ms'] / base[r['model']]:.3f}", *gib, shown, r["commit"]])
    return grid(columns, cells)


def reserved(about: About, rows: Sequence[Row]) -> list[str]:
    """GiB of the last of the steps, and of the first."""
    columns = (
        "model",
        "allocator",
        "budget",
        "allocated",
        "reserved",
        "reserved / allocated",
        "reserved, first step",
        "planned height",
        "arena",
    )
    cells = []
    for r in rows:
        allocated, held = r["allocated_bytes_per_step"][-1], r["reserved_bytes_per_step"]
        height = r.get("arena_bytes")
        arena = f"{height / GIB:.3f}" if height else ""
        line = [r["model"], ALLOCATORS[r["allocator"]], f"{r['budget_bytes'] / GIB:.2f}", f"{allocated / GIB:.3f}", f"{held[-1] / GIB:.3f}"]
        line += [f"{held[-1] / allocated:.3f}", f"{held[0] / GIB:.2f}", f"{r['planned_height_bytes'] / GIB:.3f}", arena]
        cells.append([*line, f"{median_high(r['step_ms']):.1f}", r["commit"]])
    return grid((*columns, "ms a step", "commit"), cells)


def convolutions(about: About, rows: Sequence[Row]) -> list[str]:
    """The passes in which PyTorch takes a workspace worth the name."""
    key = ("model", "layout", "layer", "pass")
    large = {tuple(r[k] for k in key) for r in rows if r["algorithm"] == "pytorch" and r["workspace_mib"] >= WORTH_SHOWING_MIB}
    return plain(about, [r for r in rows if tuple(r[k] for k in key) in large])


def zoo(about: About, rows: Sequence[Row]) -> list[str]:
    ran = [r for r in rows if "measured_bytes" in r]
    models = list(dict.fromkeys(r["model"] for r in rows))
    fine = [m for m in models if all(r["status"] in ("works", "infeasible") for r in rows if r["model"] == m)]
    misses = [abs(r["measured_bytes"] / r["predicted_bytes"] - 1) for r in ran]
    columns = (
        "model",
        "ops",
        "fixed MB",
        "keep-all MB",
        "%",
        "status",
        "gradients",
        "budget MB",
        "predicted MB",
        "measured MB",
        "time / eager",
    )
    return [
        f"- **{len(fine)} of {len(models)} models work at every feasible budget** (a budget is infeasible where that is proven).",
        f"- Wrong gradients: {sum(r['status'] == 'wrong' for r in rows)}. Above budget: {sum(r['status'] == 'above budget' for r in rows)}. "
        f"Runs with every gradient, loss and buffer bitwise equal over two optimizer steps: {sum(r['bitwise'] for r in ran)} of {len(ran)}.",
        f"- Measured against predicted peak of the whole step: worst {max(misses, default=0):.3%}, "
        f"exact to the byte in {sum(m == 0 for m in misses)} of {len(misses)} runs.",
        "",
        *grid((*columns, "commit"), [_zoo_line(r) for r in rows]),
        "",
        "What did not run:",
        "",
        *(f"- {r['model']} at {r['percent']} %: {r['status']}. {r.get('reason', '')}" for r in rows if r["status"] != "works"),
    ]


def _zoo_line(r: Row) -> list[Any]:
    def mb(key: str) -> str:
        return f"{r[key] / 1e6:.3f}" if key in r else ""

    head = [r["model"], r.get("num_ops", ""), mb("fixed_bytes"), mb("keep_all_bytes"), r["percent"], r["status"]]
    if "measured_bytes" not in r:
        stated = re.search(r"proven minimum [^(]*\((\d+) bytes\)", r.get("reason", ""))
        return [*head, "", mb("budget_bytes"), f"at least {int(stated[1]) / 1e6:.3f}" if stated else "", "", "", r["commit"]]
    equal = "bitwise" if r["bitwise"] else f"{r['worst_difference']:.0e}"
    return [*head, equal, mb("budget_bytes"), mb("predicted_bytes"), mb("measured_bytes"), f"{r['time_ratio']:.2f}", r["commit"]]


def chains(about: About, rows: Sequence[Row]) -> list[str]:
    def beaten(row: Row) -> bool:
        return any(r["cost"] < row["cost"] for r in rows if (r["theme"], r["length"]) == (row["theme"], row["length"]) and "cost" in r)

    higher = sum(beaten(r) for r in rows if r["package"] == "memfit" and "cost" in r)
    lines = [f"Cases in which another package's schedule is cheaper than memfit's: {higher}.", ""]
    for theme in dict.fromkeys(r["theme"] for r in rows):
        own = [r for r in rows if r["theme"] == theme]
        cells = []
        for length in dict.fromkeys(r["length"] for r in own):
            group = {r["package"]: r for r in own if r["length"] == length}
            best = min((r["cost"] for r in group.values() if "cost" in r), default=0)
            shown = [_chain_cell(group[p], best) if p in group else "not run" for p in PACKAGES]
            cells.append([f"{length:,}", *shown, next(iter(group.values()))["commit"]])
        lines += [f"### {theme}", "", *grid(("steps", *PACKAGES, "commit"), cells), ""]
    return lines


def _chain_cell(row: Row, best: float) -> str:
    if "failure" in row:
        return str(row["failure"])
    ratio = "" if row["cost"] <= best else f" ({row['cost'] / best:.2f}×)"
    warm = "" if row["warm_s"] is None else f", warm {row['warm_s']:.3g} s"
    return f"{row['cost']:,}{ratio} in {row['cold_s']:.3g} s{warm}"


def against_torch(about: About, rows: Sequence[Row]) -> list[str]:
    lines = []
    for key, label in {"min-cut": "min-cut", "√n": "√n segments", "per block": "per block"}.items():
        mine = [r for r in rows if r["method"].startswith(key)]
        count = {v: sum(r["verdict"].startswith(v) for r in mine) for v in ("faster", "equal", "LOST")}
        saved = [r["theirs"] - r["memfit"] for r in mine if r["memfit"] != ""]
        lines.append(
            f"- against {label}: {len(mine)} comparisons, {count['faster']} faster, {count['equal']} equal, {count['LOST']} lost; "
            f"mean {mean(saved or [0]):.1f}, most {max(saved, default=0):.1f} points of overhead less"
        )
    return [*lines, "", *plain(about, rows)]


def offsets_unseen(about: About, rows: Sequence[Row]) -> list[str]:
    """Per version and shape, how many were solved within some seconds; then every instance."""
    cells = []
    for version in dict.fromkeys(row["version"] for row in rows):
        own = [row for row in rows if row["version"] == version]
        for shape in [*dict.fromkeys(row["instance"].split()[0] for row in own), "all"]:
            these = [row for row in own if shape in ("all", row["instance"].split()[0])]
            cells.append([version, shape, *(sum(r["solved"] and r["seconds"] <= s for r in these) for s in WITHIN_S), len(these)])
    return [*grid(("version", "shape", *(f"within {s} s" for s in WITHIN_S), "of"), cells), "", *plain(about, rows)]


def house(about: About, rows: Sequence[Row]) -> list[str]:
    """A table for each part, with a column for each tree."""
    del about
    commits = {r["tree"]: r["commit"] for r in rows}
    lines: list[str] = []
    for part in dict.fromkeys(r["part"] for r in rows):
        own = {(r["what"], r["tree"]): r["value"] for r in rows if r["part"] == part}
        trees = [tree for tree in commits if any(key[1] == tree for key in own)]
        cells = [[what, *(own.get((what, tree), "") for tree in trees)] for what in dict.fromkeys(what for what, _ in own)]
        seen = {r["tree"]: r["commit"] for r in rows if r["part"] == part}
        lines += [f"### {part[0].upper()}{part[1:]}", "", *grid(["", *(f"{tree} ({seen[tree]})" for tree in trees)], cells), ""]
    return lines


TABLES: dict[str, Callable[[About, Sequence[Row]], list[str]]] = {
    "columns": plain,
    "raw": raw,
    "compiled": compiled,
    "bounds": bounds,
    "eager": eager,
    "reserved": reserved,
    "convolutions": convolutions,
    "zoo": zoo,
    "house": house,
    "chains": chains,
    "against_torch": against_torch,
    "offsets_unseen": offsets_unseen,
}
