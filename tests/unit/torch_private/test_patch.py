"""Patches of torch are put back, whatever happens inside, and refused on a torch that nobody tried."""

from __future__ import annotations

import pytest
import torch

from memfit.core.errors import Unsupported
from memfit.torch_private import probe
from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.recurrent import trace_as_cells


class Owner:
    kept = 1

    @classmethod
    def name(cls) -> str:
        return "plain"


def test_patches_are_put_back_as_they_were() -> None:
    before = dict(vars(Owner))
    with patch_torch("test", Patch(Owner, "name", classmethod(lambda cls: "patched")), Patch(Owner, "new", 3), Patch(Owner, "kept", 2)):
        assert (Owner.name(), Owner.new, Owner.kept) == ("patched", 3, 2)  # type: ignore[attr-defined]
    assert dict(vars(Owner)) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_patch_stays_when_an_exception_comes(error: type[BaseException]) -> None:
    before = dict(vars(Owner))
    with pytest.raises(error), patch_torch("test", Patch(Owner, "kept", 2)):
        raise error
    with pytest.raises(TypeError), patch_torch("test", Patch(Owner, "kept", 2), Patch(None, "name", 1)):
        raise AssertionError("not reached")
    assert dict(vars(Owner)) == before


def test_a_torch_that_nobody_tried_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NEWEST", (2, 10))
    monkeypatch.setattr(probe, "_accepts_untested", False)
    with pytest.raises(Unsupported, match="tested on"), patch_torch("test", Patch(Owner, "kept", 2)):
        raise AssertionError("not reached")
    assert Owner.kept == 1


def test_tracing_leaves_torch_as_it_was() -> None:
    before = torch._C._select_conv_backend, torch._C._get_mkldnn_enabled()
    with trace_as_cells(torch.nn.LSTM(2, 2)):
        assert torch._C._select_conv_backend is not before[0]
    with pytest.raises(ValueError, match="stop"), trace_as_cells(torch.nn.LSTM(2, 2)):
        raise ValueError("stop")
    assert (torch._C._select_conv_backend, torch._C._get_mkldnn_enabled()) == before
