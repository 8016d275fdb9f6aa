"""The state of the world that a step was planned for: training flags and autocast. Backward may come in another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Training flags of the modules, in order, and autocast by device type: (on, type)."""

    training: tuple[bool, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool

    @classmethod
    def now(cls, model: nn.Module, device: torch.device) -> Moment:
        types = sorted({"cpu", device.type})
        return cls(
            training=tuple(m.training for m in model.modules()),
            autocast=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
            caches=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def again(self, model: nn.Module) -> Iterator[None]:
        """Inside it all is as it was then; the present comes back in the end."""
        modules = list(model.modules())
        present = [m.training for m in modules]
        with ExitStack() as stack:
            for kind, on, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self.caches))
            try:
                for module, flag in zip(modules, self.training, strict=False):
                    module.training = flag
                yield
            finally:
                for module, flag in zip(modules, present, strict=True):
                    module.training = flag
