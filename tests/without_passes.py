"""A pipeline with passes left out, to show what they are for. Imports torch."""

from __future__ import annotations

import pytest

from memfit.passes.table import PIPELINE


def leave_out(patch: pytest.MonkeyPatch, *names: str) -> None:
    known = {slot.rewrite.name for slots in PIPELINE.values() for slot in slots}
    assert known.issuperset(names)
    for engine, slots in PIPELINE.items():
        patch.setitem(PIPELINE, engine, tuple(slot for slot in slots if slot.rewrite.name not in names))
