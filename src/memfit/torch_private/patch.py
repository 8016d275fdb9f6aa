"""Replace functions of torch for a while: the one way in which memfit patches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from memfit.torch_private.probe import require_tested

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner.name` is `value` while the patch is applied. The owner is a module or a class of torch."""

    owner: Any
    name: str
    value: Any


@contextmanager
def patch_torch(need: str, *patches: Patch) -> Iterator[None]:
    """Apply the patches, and put everything back in the end, also when an exception comes. Refuses a torch that is not tested."""
    require_tested(need)
    with ExitStack() as undo:
        for patch in patches:
            undo.callback(_put_back, patch.owner, patch.name, vars(patch.owner).get(patch.name, _NOTHING))
            setattr(patch.owner, patch.name, patch.value)
        yield


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
