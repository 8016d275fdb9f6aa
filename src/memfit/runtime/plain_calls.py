"""While a fitted model is called, every fitted model that is reached from there is the plain one.

fitted(x) ── stepper ── plain model ── forward that a tool made from the fitted model's own ── fitted.forward: plain from here on
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Calls(threading.local):
    plain = False


_calls = _Calls()


def are_plain() -> bool:
    """Whether fitted models that this thread calls now stand for the plain ones."""
    return _calls.plain


@contextmanager
def made_plain() -> Iterator[None]:
    before, _calls.plain = _calls.plain, True
    try:
        yield
    finally:
        _calls.plain = before
