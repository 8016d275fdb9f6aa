"""run_chain with states on a CUDA device: pinned host memory as a level, and the device inside its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.chain.run.levels import ChainCosts

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("levels", [{}, {"host": 40}, {"host": 10, "disk": "1GB"}])
def test_exact_and_inside_the_device_budget(tmp_path: Path, levels: dict[str, Any]) -> None:
    start = torch.linspace(0, 1, 2**20, device="cuda")
    size = start.numel() * start.element_size()

    def step(x: Any, i: int) -> Any:
        return x.add_(0.1 * torch.sin(x))

    def adjoint(x: Any, y: Any, i: int) -> Any:
        return y.mul_(1 + 0.1 * torch.cos(x))

    expected = memfit.run_chain(step, adjoint, start, 60, seed=torch.ones_like(start), budget="4GiB").adjoint
    options = {**levels, "host": levels["host"] * size} if "host" in levels else dict(levels)
    if "disk" in options:
        options["folder"] = tmp_path
    costs = ChainCosts(forward_s=1e-2, host_write_s=1e-4, host_read_s=1e-4, disk_write_s=1e-3, disk_read_s=1e-3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = memfit.run_chain(step, adjoint, start, 60, seed=torch.ones_like(start), budget=9 * size, costs=costs, **options)
    torch.cuda.synchronize()
    assert torch.equal(result.adjoint, expected)
    assert torch.cuda.max_memory_allocated() - before <= (9 + 2) * size  # the functions' own temporaries come on top
    if "host" in options:
        assert result.writes["host"] > 0
