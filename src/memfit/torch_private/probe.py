"""Is what memfit needs of torch there? A symbol is looked up once; a missing one is refused with the need and the next move."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.errors import Unsupported

OLDEST, NEWEST = (2, 11), (2, 13)
"""The versions of torch that memfit is tested on."""
TESTED = f"torch {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
SYMBOLS: dict[str, Symbol] = {}
"""Every symbol that some module of memfit has asked for, by its path: what `scripts/nightly.py` probes."""
_accepts_untested = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """Something private of torch, by its dotted path, and what memfit needs it for. Call it to have the object itself."""

    path: str
    need: str
    optional: bool = False

    def __post_init__(self) -> None:
        SYMBOLS[self.path] = self

    @property
    def is_there(self) -> bool:
        return _look_up(self.path) is not None

    def __call__(self) -> Any:
        """The object, probed once; None for an optional one that this torch does not have."""
        found = _look_up(self.path)
        if found is None and not self.optional:
            raise self._refusal()
        return found

    def of(self, owner: Any) -> Any:
        """The attribute of this name that another object of the same kind has."""
        try:
            return getattr(owner, self.path.rpartition(".")[2])
        except AttributeError:
            raise self._refusal() from None

    def _refusal(self) -> Unsupported:
        return Unsupported(f"torch {torch.__version__} has no {self.path}, which memfit needs to {self.need}: install {TESTED}.")


@functools.cache
def _look_up(path: str) -> Any:
    """The object of this path, whose first parts are modules; None if there is none."""
    parts = path.split(".")
    found: Any = None
    for position, part in enumerate(parts):
        if position and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[: position + 1]))
        except ImportError:
            return None
    return found


def at_least(version: tuple[int, int]) -> bool:
    """Whether this torch is that version or a later one."""
    return _version() >= version


def is_tested() -> bool:
    """Whether memfit is tested on this torch, or was told to run on it all the same."""
    return _accepts_untested or OLDEST <= _version() <= NEWEST


def require_tested(need: str, way_round: str = "") -> None:
    """Refuse a torch that memfit is not tested on, for what depends on how torch works inside. `way_round`: what else the user can do."""
    if not is_tested():
        raise Unsupported(
            f"this is torch {torch.__version__}, and memfit is tested on {TESTED}: on others it does not {need}, lest results be wrong. "
            f"{way_round and way_round + ', or '}install a version that is tested, or try it with memfit.torch_private.probe.accept_untested()."
        )


def accept_untested(accept: bool = True) -> None:
    """Run on this torch though memfit is not tested on it. For trying a new one; results may be wrong where torch changed inside."""
    global _accepts_untested
    _accepts_untested = accept


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
