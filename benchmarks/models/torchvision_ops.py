"""Lets torchvision import beside a CPU-only torch, whose wheel has no compiled torchvision ops: missing ops are declared on demand."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

_LIBRARY: Any = None


def declare_missing_ops() -> None:
    """Import torchvision with its missing `torchvision::` operators declared, without kernels. A no-op where it imports anyway."""
    global _LIBRARY
    if _LIBRARY is not None or importlib.util.find_spec("torchvision") is None or torch.cuda.is_available():
        return
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    original = torch._C._dispatch_has_kernel_for_dispatch_key

    def tolerant(name: str, key: Any) -> bool:
        try:
            return bool(original(name, key))
        except RuntimeError:
            if name.startswith("torchvision::"):
                _LIBRARY.define(f"{name.split('::')[1].split('.')[0]}(Tensor x) -> Tensor")
                return bool(original(name, key))
            raise

    torch._C._dispatch_has_kernel_for_dispatch_key = tolerant
    try:
        import torchvision  # noqa: F401
    finally:
        torch._C._dispatch_has_kernel_for_dispatch_key = original
