"""What decides besides the graph which code Inductor writes, to be the same in processes that write for this one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from memfit.compilers.inductor import private
from memfit.compilers.inductor.code_folder import code_folder
from memfit.compilers.inductor.lowerings import lowering
from memfit.torch_private.probe import accept_untested, is_tested

_PRECISIONS = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As one process has them."""

    cache_folder: str
    inductor: bytes
    precisions: tuple[bool, ...]
    deterministic: bool
    default_dtype: torch.dtype
    num_threads: int
    accepts_torch: bool

    @classmethod
    def here(cls) -> Settings:
        return cls(
            cache_folder=str(code_folder()),
            inductor=private.config().save_config(),
            precisions=tuple(getattr(where, name) for where, name in _PRECISIONS),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            default_dtype=torch.get_default_dtype(),
            num_threads=torch.get_num_threads(),
            accepts_torch=is_tested(),
        )

    def apply(self) -> None:
        lowering()  # memfit's own ops
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.cache_folder
        private.config().load_config(self.inductor)
        for (where, name), value in zip(_PRECISIONS, self.precisions, strict=True):
            if getattr(where, name) != value:  # saying no to what nobody asked for is another setting than saying nothing
                setattr(where, name, value)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.num_threads)
        if self.accepts_torch and not is_tested():
            accept_untested()
