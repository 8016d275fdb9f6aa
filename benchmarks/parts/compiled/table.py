"""The table and the plot of `compiled.py measure`: every point of memory and time per model, which of them no other point beats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.lib.results import read_results

_QUIET = 1.03
_COLOURS = {
    "memfit": "#d62728",
    "memfit, replayed": "#8c1a1a",
    "compile": "#1f77b4",
    "compile, replayed": "#0b3d66",
    "budget": "#17becf",
    "compile + checkpoint": "#2ca02c",
    "eager": "#7f7f7f",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON lines of compiled.py measure")
    parser.add_argument("--png", type=Path, help="draw the frontiers here")
    args = parser.parse_args()
    models = by_model(read_results(args.results)[1])
    print(
        "\n\n".join(
            [
                summary(models),
                summary(models, ", replayed"),
                starts(models),
                exactness(models),
                *(section(name, rows) for name, rows in models.items()),
            ]
        )
    )
    if args.png:
        draw(models, args.png)


def by_model(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [r for r in records if r["model"] == name] for name in dict.fromkeys(r["model"] for r in records)}


def points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a time and a peak, of forward and backward alone."""
    return [r for r in rows if "ms" in r and "peak_bytes" in r and "AdamW" not in r["what"]]


def _base(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((r for r in points(rows) if r["what"] == "compile"), None)


def summary(models: dict[str, list[dict[str, Any]]], how: str = "") -> str:
    """A line per model: memfit's time at each budget as a multiple of torch.compile's, and how many points of peers it does not beat.

    `how` is ", replayed" for steps from a CUDA graph, beside torch.compile's own step captured in one where that was measured.
    Where the closed loop planned again, its last plan counts; a star marks a peak above the budget. In brackets the fastest step, where
    the median is more than 3 % above it: somebody else was at work.
    """
    budgets = ["100%", "75%", "50%", "40%", "33%", "25%", "a third of eager"]
    last = "torch.compile replayed, GiB, ms" if how else "peers' points beaten"
    lines = [f"| x torch.compile{how} | GiB, ms | {' | '.join(budgets)} | {last} |", "|" + "---|" * (len(budgets) + 3)]
    for name, rows in models.items():
        base = _base(rows)
        if base is None or not any(r["what"].endswith(how) and r["what"].startswith("memfit") for r in rows):
            continue
        cells = [_cell([r for r in rows if r["what"] == f"memfit {b}{how}"], base["ms"]) for b in budgets]
        peer = next((f"{r['peak_bytes'] / 2**30:.2f}, {r['ms']:.1f}" for r in points(rows) if _is_compile_replayed(r)), "")
        end = peer if how else _beaten(rows)
        lines.append(f"| {name} | {base['peak_bytes'] / 2**30:.2f}, {base['ms']:.1f} | {' | '.join(cells)} | {end} |")
    return "\n".join(lines)


def _is_compile_replayed(row: dict[str, Any]) -> bool:
    return str(row["what"]) in ("compile, replayed", "compile again, replayed")


def _cell(rows: list[dict[str, Any]], base_ms: float) -> str:
    timed = [r for r in rows if "ms" in r]
    if not timed:
        return {"InfeasibleBudget": "infeasible", "NoPlanFound": "no plan"}.get(rows[-1].get("status", ""), "failed") if rows else ""
    last = timed[-1]
    fastest = f" ({last['ms_min'] / base_ms:.3f})" if last["ms"] > _QUIET * last["ms_min"] else ""
    return f"{last['ms'] / base_ms:.3f}{fastest}{'*' if last['peak_bytes'] > last['budget_bytes'] else ''}"


def _beaten(rows: list[dict[str, Any]]) -> str:
    ours, peers = [[r for r in points(rows) if r["what"].startswith("memfit") == mine] for mine in (True, False)]
    ours = [r for r in ours if r["peak_bytes"] <= r.get("budget_bytes", r["peak_bytes"])]
    lost = [p["what"] for p in peers if not any(o["ms"] <= p["ms"] and o["peak_bytes"] <= p["peak_bytes"] for o in ours)]
    return f"{len(peers) - len(lost)} of {len(peers)}" + (f", not: {', '.join(lost)}" if lost else "")


def starts(models: dict[str, list[dict[str, Any]]]) -> str:
    """Seconds to the end of the first step."""
    lines = ["| seconds to the end of the first step | torch.compile | memfit.fit | memfit.fit, from disk |", "|---|---|---|---|"]
    for name, rows in models.items():
        parts = {"compile": "compile", "compile again": "compile", "start": "start", "start again": "start again"}  # the later counts
        found = {parts[r["part"]]: r["cold_s"] for r in rows if r["part"] in parts and "cold_s" in r}
        if "start" in found:
            lines.append(
                f"| {name} | " + " | ".join(f"{found[p]:.0f}" if p in found else "" for p in ("compile", "start", "start again")) + " |"
            )
    return "\n".join(lines)


def exactness(models: dict[str, list[dict[str, Any]]]) -> str:
    """Distances of gradients from fp64 with dropout switched off: of all entries together, and of the worst relative to its tensor's largest."""
    lines = [
        "| gradients from fp64, dropout off: norm (worst) | eager | torch.compile | memfit | memfit, tighter |",
        "|---|---|---|---|---|",
    ]
    for name, rows in models.items():
        found = [r for r in rows if r["part"] == "gradients" and "from_fp64" in r]
        cells = [f"{r['from_fp64']['norm']:.5f} ({r['from_fp64']['worst']:.4f})" for r in found]
        if found:
            lines.append(f"| {name} | " + " | ".join([*cells, *[""] * (4 - len(cells))]) + " |")
    return "\n".join(lines)


def section(name: str, rows: list[dict[str, Any]]) -> str:
    """One model: a line per row, in the order measured. "beaten by" names a faster point in no more memory."""
    base = _base(rows)
    lines = [
        f"### {name}",
        "",
        "| what | ms (min) | x torch.compile | GiB measured | GiB predicted | GiB budget | beaten by | run | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in rows if r["part"] != "gradients"):
        end = f"{r.get('run', '')} | {r['commit']} |"
        if "reserved_bytes" in r:
            text = ", ".join(f"{b / 2**30:.2f}" for b in r["reserved_bytes"])
            lines.append(f"| {r['what']} | GiB reserved in each step: {text} | | | | {r['budget_bytes'] / 2**30:.2f} | | {end}")
            continue
        if "ms" not in r:
            text = (
                r.get("reason")
                or r.get("error")
                or f"{r['cold_s']:.1f} s"
                + "".join(f", {k.removesuffix('_s')} {sum(r[k]):.1f}" for k in ("capture_s", "compile_s", "measure_s") if k in r)
                + (f", {r['regions'][0]} regions" if r.get("regions") else "")
            )
            lines.append(f"| {r['what']} | {text} | | | | | | {end}")
            continue
        ratio = f"{r['ms'] / base['ms']:.3f}" if base else ""
        gib = [f"{r[k] / 2**30:.2f}" if k in r else "" for k in ("peak_bytes", "predicted_peak_bytes", "budget_bytes")]
        cold = f", cold {r['cold_s']:.0f} s" if r["what"].startswith("compile") and "cold_s" in r else ""
        lines.append(
            f"| {r['what']}{cold} | {r['ms']:.1f} ({r['ms_min']:.1f}) | {ratio} | {' | '.join(gib)} | {beaten_by(r, rows)} | {end}"
        )
    return "\n".join(lines)


def beaten_by(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    better = [r for r in points(rows) if r["ms"] < row["ms"] and r["peak_bytes"] <= row["peak_bytes"]]
    return min(better, key=lambda r: float(r["ms"]))["what"] if better else ""


def draw(models: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 4
    figure, axes = plt.subplots(
        -(-len(models) // columns), columns, figsize=(4.2 * columns, 3.6 * -(-len(models) // columns)), squeeze=False
    )
    for axis in axes.flat[len(models) :]:
        axis.set_visible(False)
    for axis, (name, rows) in zip(axes.flat, models.items(), strict=False):
        for kind, colour in _COLOURS.items():
            own = sorted((r["peak_bytes"] / 2**30, r["ms_min"]) for r in points(rows) if _kind(r["what"]) == kind)
            if own:
                axis.plot(*zip(*own, strict=True), "o-" if kind.startswith("memfit") else "s", color=colour, label=kind, markersize=5)
        axis.set_title(name)
        axis.set_xlabel("GiB at the peak")
        axis.set_ylabel("ms, fastest of ten steps")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _kind(what: str) -> str:
    kind = next(k for k in ("memfit", "budget", "compile + checkpoint", "compile", "eager") if what.startswith(k))
    return f"{kind}, replayed" if what.endswith(", replayed") else kind
