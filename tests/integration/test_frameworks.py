"""A part of the situations inside accelerate, the Hugging Face Trainer and Lightning: `benchmarks/guards.py frameworks` has them all."""

from __future__ import annotations

import pytest
from benchmarks.parts.guards.frameworks import Case, cases, run

MODULES = {"accelerate": "accelerate", "Trainer": "transformers", "Lightning": "pytorch_lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases())[::8], ids=lambda case: case.name)
def test_training_through_a_framework_is_the_same(case: Case) -> None:
    pytest.importorskip(MODULES[case.framework])
    row = run(case, "eager")
    assert row["verdict"] == "SAME", row["why"]


def test_frameworks_and_what_happens_in_them_are_multiplied_out() -> None:
    every = list(cases())
    assert len(every) == len({case.name for case in every}) == 3 * 2 * 2 * 2 * 7
