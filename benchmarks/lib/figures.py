"""README's figures: the best valid rows of the two engines on the H200, as short tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.lib.results import Row
from benchmarks.parts.compiled.table import by_model, points

GIB = 2**30
NAMES = {
    "resnet50": "ResNet-50 (184)",
    "gpt2": "GPT-2 (16×1024, bf16, dropout)",
    "unet": "UNet (11×416×608)",
    "llama1b": "Llama 1B (4×2048, bf16)",
    "vit_l": "ViT-L (128, bf16)",
    "vgg16": "VGG-16 (176)",
    "googlenet": "GoogLeNet (320)",
    "mobilenet_v2": "MobileNet-V2 (272)",
}


def compiled_figures(rows: Sequence[Row]) -> str:
    lines = [
        "| model | torch.compile | memfit, no budget | in half of that memory | in a third of eager's | torch.compile + checkpoint | memfit in no more |",
        "|---|---|---|---|---|---|---|",
    ]
    models = by_model(list(rows))
    for name, label in NAMES.items():
        own = points(models[name])
        base = next(r for r in own if r["what"] == "compile")
        blocks = next(r for r in own if r["what"] == "compile + checkpoint")
        cells = [
            f"{base['ms']:.1f} ms, {base['peak_bytes'] / GIB:.1f} GiB",
            shown(at(own, base["peak_bytes"]), base, 0.95 * base["peak_bytes"]),
            shown(at(own, base["peak_bytes"] / 2), base, 0),
            shown(third(own), base, base["peak_bytes"]),
            f"{blocks['ms'] / base['ms']:.2f}x in {blocks['peak_bytes'] / GIB:.1f} GiB",
            shown(fastest((r for r in ours(own) if r["peak_bytes"] <= blocks["peak_bytes"]), base), base, 0),
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_words(called(models)), "", *_words(beaten(models))])


def ours(own: Iterable[Row]) -> list[Row]:
    """memfit's points inside their budgets."""
    return [r for r in own if r["what"].startswith("memfit") and r["peak_bytes"] <= r["budget_bytes"]]


def at(own: Sequence[Row], budget_bytes: float) -> Row:
    base = next(r for r in own if r["what"] == "compile")
    return fastest((r for r in ours(own) if abs(r["budget_bytes"] / budget_bytes - 1) < 0.001), base)


def third(own: Sequence[Row]) -> Row:
    base = next(r for r in own if r["what"] == "compile")
    return fastest((r for r in ours(own) if r["what"].startswith("memfit a third of eager")), base)


def fastest(found: Iterable[Row], base: Row) -> Row:
    """To two digits of its ratio; of equals the one in least memory."""
    return min(found, key=lambda r: (round(r["ms"] / base["ms"], 2), r["peak_bytes"]))


def shown(row: Row, base: Row, below_bytes: float) -> str:
    """As a multiple of torch.compile's time; with its memory where that is below a limit worth saying."""
    replayed = " r" if row["what"].endswith("replayed") else ""
    memory = f" in {row['peak_bytes'] / GIB:.2f} GiB" if row["peak_bytes"] < below_bytes else ""
    return f"**{row['ms'] / base['ms']:.2f}x**{replayed}{memory}"


def called(models: dict[str, list[Row]]) -> str:
    ratios = {}
    for name, label in NAMES.items():
        own = points(models[name])
        base = next(r for r in own if r["what"] == "compile")
        ratios[label.split(" (")[0]] = next(r for r in own if r["what"] == "memfit a third of eager")["ms"] / base["ms"]
    high = {name: ratio for name, ratio in ratios.items() if ratio > 1.10}
    said = ", ".join(f"{ratio:.2f}x on {name}" for name, ratio in high.items())
    return (
        f"Called step by step instead of replayed, a third of eager's memory costs {said}, at most "
        f"{max(r for n, r in ratios.items() if n not in high):.2f}x on the others."
    )


def beaten(models: dict[str, list[Row]]) -> str:
    peers = lost = 0
    replays = []
    for rows in models.values():
        own = points(rows)
        base = next(r for r in own if r["what"] == "compile")
        mine, others = ours(own), [r for r in own if not r["what"].startswith("memfit")]
        peers += len(others)
        lost += sum(not any(o["ms"] <= p["ms"] and o["peak_bytes"] <= p["peak_bytes"] for o in mine) for p in others)
        replays += [r["ms"] / base["ms"] for r in own if r["what"] in ("compile, replayed", "compile again, replayed")]
    return (
        f"Of {peers} points of torch.compile and eager PyTorch (with checkpoints, with any `activation_memory_budget`, captured in a CUDA graph: "
        f"{min(replays):.2f}x to {max(replays):.2f}x) memfit is at no more memory as fast or faster than {peers - lost}."
    )


def start_figures(rows: Sequence[Row]) -> str:
    """Seconds to the end of the first step, the latest measurement of each."""
    lines = ["| cold start, s | " + " | ".join(label.split(" (")[0] for label in NAMES.values()) + " |", "|---|" + "---|" * len(NAMES)]
    parts = {"compile": "compile", "compile again": "compile", "start": "start", "start again": "start again"}
    found = {(r["model"], parts[r["part"]]): r["cold_s"] for r in rows if r["part"] in parts and "cold_s" in r}
    for part, label in (("compile", "torch.compile"), ("start", "memfit.fit"), ("start again", "memfit.fit, from disk")):
        lines.append(f"| {label} | " + " | ".join(f"{found[name, part]:.0f}" for name in NAMES) + " |")
    return "\n".join(lines)


def eager_figures(rows: Sequence[Row]) -> str:
    lines = ["| model | eager | | per-block checkpointing | | memfit at that memory | |", "|---|---|---|---|---|---|---|"]
    for name in ("resnet50", "gpt2", "unet", "vgg16", "googlenet", "mobilenet_v2"):
        last = {r["what"]: r for r in rows if r["model"] == name and "ms" in r}
        cells = [last[w] for w in ("eager", "checkpoint per block", "memfit at checkpoint's memory")]
        times = [f"{r['ms']:.1f} ms" for r in cells]
        times[2] = f"**{times[2]}**"
        pairs = [f"{ms} | {r['peak_bytes'] / GIB:.2f} GiB" for ms, r in zip(times, cells, strict=True)]
        lines.append(f"| {NAMES[name].split(' (')[0]} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def _words(text: str, width: int = 140) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
