"""A bounded dictionary that forgets what was used the longest ago."""

from __future__ import annotations

import gc
import weakref

from memfit.core.recent import Recent


class Thing:
    pass


def test_what_was_used_the_longest_ago_falls_out_and_is_freed() -> None:
    recent: Recent[Thing] = Recent(2)
    alive = weakref.ref(recent.keep("a", Thing()))
    recent.keep("b", Thing())
    assert recent.find("a") is not None  # used: now "b" is the oldest
    recent.keep("c", Thing())
    assert recent.find("b") is None
    assert len(recent) == 2
    recent.keep("d", Thing())
    gc.collect()
    assert alive() is None
    assert len(list(recent.values())) == 2
