"""A symbol that is gone, a torch that is too new: refused with the version, the need and the next move."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest
import torch
from torch import nn

import memfit
import memfit.torch_private
from memfit.core.errors import Unsupported
from memfit.torch_private import probe
from memfit.torch_private.probe import SYMBOLS, Symbol, accept_untested, is_tested, require_tested


@pytest.fixture
def newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NEWEST", (2, 10))
    monkeypatch.setattr(probe, "_accepts_untested", False)


@pytest.fixture(autouse=True)
def known_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SYMBOLS", dict(SYMBOLS))


def test_this_torch_has_all_that_memfit_needs() -> None:
    for module in pkgutil.iter_modules(memfit.torch_private.__path__):
        importlib.import_module(f"memfit.torch_private.{module.name}")
    importlib.import_module("memfit.compilers.inductor.private")
    assert len(probe.SYMBOLS) > 50
    assert [s.path for s in probe.SYMBOLS.values() if not s.is_there and not s.optional] == []


def test_a_missing_symbol_is_refused_with_version_need_and_next_move() -> None:
    gone = Symbol("torch._nowhere.anything", "count sheep")
    here = re.escape(torch.__version__)
    with pytest.raises(
        Unsupported, match=rf"torch {here} has no torch\._nowhere\.anything, which memfit needs to count sheep: install torch 2\."
    ):
        gone()
    with pytest.raises(Unsupported, match="count sheep"):
        gone.of(object())
    assert Symbol("torch.nn._nothing", "count sheep", optional=True)() is None


def test_a_newer_torch_is_refused_until_it_is_accepted(newer_torch: None) -> None:
    with pytest.raises(Unsupported, match=r"does not sing, .* wrong\. Hum, or install a version .*accept_untested\(\)"):
        require_tested("sing", "Hum")
    accept_untested()
    require_tested("sing")
    accept_untested(False)
    assert not is_tested()


def test_on_a_newer_torch_the_eager_engine_runs_what_needs_no_patch(newer_torch: None) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    fitted = memfit.fit(nn.Linear(3, 2), (x,), budget="1GiB", engine="auto")
    fitted(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(Unsupported, match="does not trace recurrent layers"):
        memfit.fit(nn.LSTM(3, 2), (torch.randn(5, 4, 3),), budget="1GiB", engine="eager")
