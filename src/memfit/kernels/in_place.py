"""A pointwise op that writes its result over one of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.implementation import Implementation, Work


@dataclass(frozen=True, slots=True)
class InPlace(Implementation):
    """`overload` writes into the tensor given as `keyword`, here the argument at `position`."""

    overload: Any
    keyword: str
    position: int

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.overload(*args, **kwargs, **{self.keyword: args[self.position]})
        return result

    def work(self, made: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        return Work.over((args, kwargs), made)
