"""The doctor's screen and its JSON, from a diagnosis written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memfit.report.diagnosis import Diagnosis, Held, PassEffect, Priced, Remedy

MIB = 2**20
LAYERS = Held(
    count=12,
    kind="activation",
    size_bytes=12 * MIB,
    each_bytes=MIB,
    name="",
    made_by="aten.gelu.default",
    where="layers.0..11.mlp, net.py:7",
)
FOUND = Diagnosis(
    minimum_bytes=20 * MIB,
    form="chunked-loss",
    held_at="at op 7 (aten.mm.default) 14 storages must coexist",
    held=(LAYERS,),
    fixed={"parameter": 3 * MIB, "gradient": 0},
    as_it_is_bytes=50 * MIB,
    passes=(
        PassEffect(name="chunked-loss", numbers="rounds otherwise", before_bytes=50 * MIB, after_bytes=20 * MIB),
        PassEffect(name="in-place", numbers="same bits", before_bytes=50 * MIB, after_bytes=50 * MIB),
        PassEffect(name="relu-bits", numbers="same bits", before_bytes=50 * MIB, after_bytes=None, note="no such place in this step"),
    ),
    outside=(Remedy(what="8 rows instead of 16", after_bytes=12 * MIB, note="about 1.00 MiB a row"),),
    refused=("Dynamo has no graph of the step",),
    reached_bytes=21 * MIB,
    reached_overhead_fraction=0.25,
    keep_all_bytes=90 * MIB,
    larger=(Priced(budget_bytes=44 * MIB, overhead_fraction=0.1), Priced(budget_bytes=67 * MIB, overhead_fraction=-0.02)),
)


def test_the_screen() -> None:
    assert str(FOUND).splitlines() == [
        "minimum  20.00 MiB (20971520 bytes), proven; at op 7 (aten.mm.default) 14 storages must coexist",
        "reached  21.00 MiB (22020096 bytes) by a plan, at 25 % more op time: the next budget to ask for",
        "larger   44.00 MiB at 10 % more op time, 67.00 MiB at 2 % less op time",
        "plain    90.00 MiB: from there on nothing has to be planned",
        'what must be there together (form "chunked-loss"):',
        "    12.00 MiB  activation 12 x 1.00 MiB made by aten.gelu.default at layers.0..11.mlp, net.py:7",
        "fixed from step to step: 3.00 MiB (parameter 3.00 MiB)",
        "what memfit can do (minimum as it is 50.00 MiB, each alone):",
        "  chunked-loss  50.00 MiB -> 20.00 MiB; rounds otherwise",
        "  apply, minimum unchanged: in-place",
        "  no such place in this step: relu-bits",
        "what only you can change:",
        "  8 rows instead of 16  20.00 MiB -> 12.00 MiB; about 1.00 MiB a row",
        "refused: Dynamo has no graph of the step",
    ]


@pytest.mark.parametrize(
    ("mib", "overhead", "verdict"),
    [(None, None, ""), (19, None, "BELOW THE MINIMUM"), (20, None, "NO PLAN FOUND"), (22, 0.2, "A PLAN"), (90, 0.0, "FITS AS IT IS")],
)
def test_the_verdict(mib: int | None, overhead: float | None, verdict: str) -> None:
    asked = replace(FOUND, budget_bytes=None if mib is None else mib * MIB, budget_overhead_fraction=overhead)
    assert asked.verdict == verdict
    assert json.loads(json.dumps(asked.as_data()))["verdict"] == verdict
    assert (verdict in str(asked).splitlines()[0]) or not verdict


def test_it_stays_one_screen() -> None:
    many = replace(FOUND, held=tuple(replace(LAYERS, where=f"block{i}") for i in range(30)))
    lines = str(many).splitlines()
    assert len(lines) < 25
    assert any("264 smaller ones" in line for line in lines)


def test_less_time_is_said_so() -> None:
    assert "at 30 % less op time" in str(replace(FOUND, reached_overhead_fraction=-0.3))
