"""CUDA devices: what torch does for itself and offers nobody else."""

from __future__ import annotations

import torch

from memfit.torch_private.probe import Symbol

_SLEEP = Symbol("torch.cuda._sleep", "time kernels without the launches")
_INDEX = Symbol("torch.cuda._utils._get_device_index", "find a device's number")
_CLEAR_CUBLAS = Symbol("torch._C._cuda_clearCublasWorkspaces", "give cuBLAS a workspace inside a recording", optional=True)


def keep_busy(cycles: int) -> None:
    """Let the current stream wait, so that launches queue up behind."""
    _SLEEP()(cycles)


def device_index(device: int | torch.device | None) -> int:
    """A device's number; that of the current one for None."""
    return int(_INDEX()(device, optional=True))


def clear_cublas_workspaces() -> None:
    """Give back what cuBLAS holds: the next product takes its workspace anew. A torch without CUDA has none."""
    clear = _CLEAR_CUBLAS()
    if clear is not None:
        clear()
