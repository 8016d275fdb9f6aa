"""The table and the plot of `gpu_compiled.py`: every point of memory and time per model, which of them no other point beats."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_COLOURS = {"memfit": "#d62728", "compile": "#1f77b4", "budget": "#17becf", "compile + checkpoint": "#2ca02c", "eager": "#7f7f7f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON lines of gpu_compiled.py")
    parser.add_argument("--png", type=Path, help="draw the frontiers here")
    args = parser.parse_args()
    records = [json.loads(line) for line in args.results.read_text().splitlines()]
    print("\n\n".join(section(name, rows) for name, rows in by_model(records).items()))
    if args.png:
        draw(by_model(records), args.png)


def by_model(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [r for r in records if r["model"] == name] for name in dict.fromkeys(r["model"] for r in records)}


def section(name: str, rows: list[dict[str, Any]]) -> str:
    """One model: a line per row, in the order measured. "beaten by" names a faster point in no more memory."""
    base = next((r for r in rows if r["what"] == "compile" and "ms" in r), None)
    lines = [
        f"### {name}",
        "",
        "| what | ms (min) | x torch.compile | GiB measured | GiB predicted | GiB budget | beaten by |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "ms" not in r:
            text = (
                r.get("reason")
                or r.get("error")
                or f"{r['cold_s']:.1f} s"
                + "".join(f", {k.removesuffix('_s')} {sum(r[k]):.1f}" for k in ("capture_s", "compile_s", "measure_s") if k in r)
                + (f", {r['regions'][0]} regions" if r.get("regions") else "")
            )
            lines.append(f"| {r['what']} | {text} | | | | | |")
            continue
        ratio = f"{r['ms'] / base['ms']:.3f}" if base else ""
        gib = [f"{r[k] / 2**30:.2f}" if k in r else "" for k in ("peak_bytes", "predicted_peak_bytes", "budget_bytes")]
        cold = f", cold {r['cold_s']:.0f} s" if r["what"].startswith("compile") and "cold_s" in r else ""
        lines.append(f"| {r['what']}{cold} | {r['ms']:.1f} ({r['ms_min']:.1f}) | {ratio} | {' | '.join(gib)} | {beaten_by(r, rows)} |")
    return "\n".join(lines)


def beaten_by(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    better = [r for r in rows if "ms" in r and r["ms"] < row["ms"] and r["peak_bytes"] <= row["peak_bytes"] and "AdamW" not in r["what"]]
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
        points = [r for r in rows if "ms" in r and "AdamW" not in r["what"]]
        for kind, colour in _COLOURS.items():
            own = sorted((r["peak_bytes"] / 2**30, r["ms_min"]) for r in points if _kind(r["what"]) == kind)
            if own:
                axis.plot(*zip(*own, strict=True), "o-" if kind == "memfit" else "s", color=colour, label=kind, markersize=5)
        axis.set_title(name)
        axis.set_xlabel("GiB at the peak")
        axis.set_ylabel("ms, fastest of ten steps")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _kind(what: str) -> str:
    return next(k for k in ("memfit", "budget", "compile + checkpoint", "compile", "eager") if what.startswith(k))


if __name__ == "__main__":
    main()
