"""Planning draws no random numbers from the user's streams: what it takes is put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_random_streams() -> Iterator[None]:
    """Python's, numpy's and torch's streams are in the end where they were before. A GPU's is asked for only where one is in use."""
    python, on_cpu = random.getstate(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(on_cpu)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
