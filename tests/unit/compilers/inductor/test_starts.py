"""Marks of steps that were made ready: which are the same, where they lie, and that helpers are woken only where there is none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import memfit
from memfit.compilers.inductor import compiled_start, starts
from memfit.compilers.inductor.code_folder import code_folder
from memfit.compilers.inductor.starts import leave_mark, mark_of
from memfit.pipeline import prepare


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))


def test_a_mark_is_the_same_for_the_same_step_and_no_other() -> None:
    x = torch.zeros(2, 3)
    here = mark_of(net(), [x])
    assert mark_of(net(), [torch.ones(2, 3)]) == here  # values do not matter
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mark_of(net(), [x])
    others = [
        mark_of(net(5), [x]),
        mark_of(net().double(), [x]),
        mark_of(net().eval(), [x]),
        mark_of(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), [x]),
        mark_of(net(), [torch.zeros(5, 3)]),
        mark_of(net(), [torch.zeros(3, 2).T]),
        mark_of(net(), [x.to("meta")]),
        mark_of(net(), [x], ("another version",)),
        mixed,
    ]
    assert len({here, *others}) == len(others) + 1


def test_a_mark_lies_with_the_code() -> None:
    with fresh_cache():
        mark = mark_of(net(), [torch.zeros(2, 3)])
        assert mark.is_relative_to(code_folder())
        assert not mark.exists()
        leave_mark(mark)
        leave_mark(mark)
        assert mark.exists()
    with fresh_cache():
        assert not mark_of(net(), [torch.zeros(2, 3)]).exists()


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    leave_mark(tmp_path / "file" / "memfit_starts" / "mark")


def test_helpers_are_woken_for_what_was_never_made_ready_here_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    woken, ended = list[torch.device](), list[int]()
    monkeypatch.setattr(starts, "wake_writers", woken.append)
    monkeypatch.setattr(starts, "end_writers", lambda: ended.append(1))
    x = torch.randn(2, 3)
    with fresh_cache():
        with pytest.raises(ValueError, match="stop"), compiled_start(net(), [x]):
            raise ValueError("stop")
        assert (woken, ended) == ([torch.device("cpu")], [1])
        with compiled_start(net(), [x]):
            assert len(woken) == 2  # what was not made ready left no mark
        with compiled_start(net(), [x]):
            assert len(woken) == 2
        with compiled_start(net(5), [x]):
            assert len(woken) == 3
        assert len(ended) == 4


def test_only_steps_that_are_compiled_are_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    helped = list[nn.Module]()

    def start(model: nn.Module, *_: object) -> nullcontext[None]:
        helped.append(model)
        return nullcontext()

    monkeypatch.setattr(prepare, "compiled_start", start)
    for engine, count in (("eager", 0), ("inductor", 1)):
        memfit.fit(net(), (torch.randn(2, 3),), budget="1GiB", loss_fn=torch.sum, engine=engine)  # type: ignore[arg-type]
        assert len(helped) == count
