"""How much memory a device has left: what the check of the first step may take beside the budget."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now without pushing anybody out."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - torch.cuda.memory_allocated(device)
        return int(max(0, min(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), allowed)))
    if _MEMINFO.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_AVPHYS_PAGES" in names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**31  # a machine that does not tell
