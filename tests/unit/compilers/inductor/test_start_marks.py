"""Marks of steps that were made ready: which are the same, where they lie, and that helpers are woken only where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import memfit.pipeline.forms
from memfit.capture.inputs import Call
from memfit.compilers.inductor import compile_all, helper_processes
from memfit.compilers.inductor.cache_keys import code_folder
from memfit.compilers.inductor.start_marks import leave_mark, mark_of
from memfit.pipeline.forms import Forms
from memfit.pipeline.task import Task


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


def test_writers_are_woken_for_what_was_never_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    woken, ended = list[torch.device](), list[int]()
    monkeypatch.setattr(memfit.pipeline.forms, "wake_writers", woken.append)
    monkeypatch.setattr(compile_all, "end_writers", lambda: ended.append(1))
    call = Call.flatten((torch.randn(2, 3),), {})
    with fresh_cache():
        cold = Task(model=net(), engine="inductor")
        next(Forms(cold, call).usual())
        assert woken == [torch.device("cpu")]
        with pytest.raises(ValueError, match="stop"), helper_processes():
            raise ValueError("stop")
        assert ended == [1]
        Forms(cold, call).leave_mark()
        next(Forms(Task(model=net(), engine="inductor"), call).usual())
        assert len(woken) == 1
        Forms(Task(model=net(5), engine="eager"), call).leave_mark()
        next(Forms(Task(model=net(5), engine="inductor"), call).usual())
        assert len(woken) == 2
        next(Forms(Task(model=net(6), engine="eager"), call).usual())
        assert len(woken) == 2
