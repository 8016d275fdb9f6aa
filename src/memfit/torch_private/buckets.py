"""The buckets of DistributedDataParallel: copies of all gradients, held for as long as the wrapper lives."""

from __future__ import annotations

from typing import Any

import torch

from memfit.torch_private.probe import Symbol

_ACTIVE = Symbol("torch.nn.parallel.distributed.DistributedDataParallel._get_active_ddp_module", "count DDP's buckets", optional=True)


def count_bucket_bytes() -> int:
    """Of the wrapper whose forward is running now; 0 outside any."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    find = _ACTIVE()
    wrapper: Any = None if find is None else find()
    if wrapper is None:
        return 0
    return sum(p.nbytes for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in wrapper.parameters_to_ignore)
