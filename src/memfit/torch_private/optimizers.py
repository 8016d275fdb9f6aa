"""Optimizers on fake tensors: they step as they would on real ones, and nobody is told."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memfit.torch_private.fake import fake_type
from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.probe import Symbol

_NEED = "find out how an optimizer steps"
_OPTIMIZER = Symbol("torch.optim.optimizer", _NEED)
_TYPES = Symbol("torch.optim.optimizer._foreach_supported_types", _NEED)
_BEFORE = Symbol("torch.optim.optimizer._global_optimizer_pre_hooks", _NEED)
_AFTER = Symbol("torch.optim.optimizer._global_optimizer_post_hooks", _NEED)
_ONE_AT_A_TIME = threading.RLock()  # a second patch would put the first one back at its end


@contextmanager
def stepping_fakes() -> Iterator[None]:
    """Inside it the default way of stepping is the one for real tensors (all parameters together on a GPU, one after another on the CPU),
    and the hooks registered for all optimizers are not called in this thread."""
    with _ONE_AT_A_TIME:
        patches = (
            Patch(_OPTIMIZER(), "_foreach_supported_types", [*_TYPES(), fake_type()]),
            Patch(_OPTIMIZER(), "_global_optimizer_pre_hooks", _Elsewhere(_BEFORE())),
            Patch(_OPTIMIZER(), "_global_optimizer_post_hooks", _Elsewhere(_AFTER())),
        )
        with patch_torch(_NEED, *patches):
            yield


class _Elsewhere(dict[int, Any]):
    """The hooks for every thread but the one that made this."""

    def __init__(self, hooks: dict[int, Any]) -> None:
        super().__init__(hooks)
        self._thread = threading.get_ident()

    def values(self) -> Any:
        hooks: Iterable[Any] = () if threading.get_ident() == self._thread else super().values()
        return hooks
