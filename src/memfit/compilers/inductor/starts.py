"""Which steps were made ready on this machine before: each left a mark beside its compiled code, in Inductor's folder, and gone with it.

A step without a mark will take long to compile, so processes that help with it are woken while it is still being traced. A mark
that is missing costs processor time, one that is wrong is found out by the pace (`code_writers.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.compilers.inductor.code_folder import code_folder
from memfit.compilers.inductor.code_writers import end_writers, wake_writers
from memfit.compilers.inductor.kernel_builders import wake_builders
from memfit.torch_private.probe import require_tested


@contextmanager
def compiled_start(model: nn.Module, inputs: Sequence[torch.Tensor], about: Iterable[Any] = ()) -> Iterator[None]:
    """Around making a step ready: helper processes end with the block, however it ends, and the mark is left if it comes to its end.
    Refuses a torch that memfit is not tested on."""
    require_tested("compile regions", 'Use engine="eager"')
    wake_builders()
    mark = mark_of(model, inputs, about)
    device = next((p.device for p in model.parameters()), None)
    if device is not None and not mark.exists():
        wake_writers(device)
    try:
        yield
    finally:
        end_writers()
    leave_mark(mark)


def mark_of(model: nn.Module, inputs: Sequence[torch.Tensor], about: Iterable[Any] = ()) -> Path:
    """Where the mark of this model with inputs like these is. `about`: what else decides which code there is, versions for example."""
    tensors = [_like(t) for t in (*model.parameters(), *model.buffers(), *inputs)]
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    text = f"{torch.__version__} {list(about)} {model.training} {autocast} {tensors} {model!r}"
    return code_folder() / "memfit_starts" / hashlib.sha256(text.encode()).hexdigest()[:24]


def leave_mark(mark: Path) -> None:
    """A folder that cannot be written to is one that has nothing to find."""
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type
