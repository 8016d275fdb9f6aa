"""One executor written for the checkpoint-schedules interface runs their schedules and ours; ours never cost more."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from memfit.chain import Chain, StorageLevel, plan_hrevolve, plan_online, plan_revolve, plan_sqrt, plan_store_all, single_level
from memfit.core import Unsupported

cs = pytest.importorskip("checkpoint_schedules")
from memfit.chain.checkpoint_schedules_actions import ActionSchedule  # noqa: E402


class Executor:
    """Obeys actions as the package's documentation says, refusing what a real solver could not do; knows nothing of ours.

    `strict` also wants the slots respected and nothing left behind, which their own HRevolve (1.0.4) does not manage on disk.
    """

    def __init__(self, max_n: int, limits: dict[Any, int], *, strict: bool) -> None:
        self.max_n, self.limits, self.strict = max_n, limits, strict
        self.work: int | None = 0
        self.adj_deps: set[int] = set()
        self.adjoint = max_n
        self.stored: dict[Any, set[int]] = {cs.StorageType.RAM: set(), cs.StorageType.DISK: set()}
        self.forwards = self.finished = 0
        self.writes = dict.fromkeys(self.stored, 0)
        self.reads = dict.fromkeys(self.stored, 0)

    def run(self, schedule: Any) -> None:
        @functools.singledispatch
        def action(cp_action: Any) -> None:
            raise TypeError(f"Unexpected action: {cp_action}")

        action.register(cs.Forward)(self.forward)
        action.register(cs.Reverse)(self.reverse)
        action.register(cs.Copy)(self.copy)
        action.register(cs.Move)(self.move)
        action.register(cs.EndForward)(self.end_forward)
        action.register(cs.EndReverse)(lambda _: None)
        for cp_action in schedule:
            action(cp_action)
            if isinstance(cp_action, cs.EndReverse):
                break
        assert schedule.is_exhausted
        assert schedule.r == self.max_n
        assert self.adjoint == 0
        assert self.finished == 1
        assert not self.strict or not any(self.stored.values())

    def forward(self, action: Any) -> None:
        assert self.work == action.n0
        assert action.n0 < action.n1 <= self.adjoint
        if action.write_ics:
            self.stored[action.storage].add(action.n0)
            self.writes[action.storage] += 1
            assert not self.strict or len(self.stored[action.storage]) <= self.limits[action.storage]
        if action.write_adj_deps:
            self.adj_deps = set(action)
        self.work = action.n1
        self.forwards += len(action)

    def reverse(self, action: Any) -> None:
        assert action.n1 == self.adjoint
        assert set(action) <= self.adj_deps
        self.adjoint = action.n0
        self.adj_deps -= set(action)

    def copy(self, action: Any) -> None:
        assert action.n in self.stored[action.from_storage]
        if action.to_storage == cs.StorageType.WORK:
            self.work = action.n
            self.reads[action.from_storage] += 1

    def move(self, action: Any) -> None:
        self.copy(action)
        self.stored[action.from_storage].remove(action.n)

    def end_forward(self, _: Any) -> None:
        assert self.work == self.max_n
        self.finished += 1


def cost(executor: Executor, uf: float, ub: float, wd: float, rd: float) -> float:
    """In the H-Revolve model, where B_i needs x_i: each step's own forward with data is part of the backward."""
    disk = cs.StorageType.DISK
    return (executor.forwards - executor.max_n) * uf + executor.max_n * ub + executor.writes[disk] * wd + executor.reads[disk] * rd


def execute(schedule: Any, max_n: int, ram: int, disk: int, *, strict: bool = True) -> Executor:
    executor = Executor(max_n, {cs.StorageType.RAM: ram, cs.StorageType.DISK: disk}, strict=strict)
    executor.run(schedule)
    return executor


@pytest.mark.parametrize("max_n", [1, 2, 3, 10, 47])
@pytest.mark.parametrize("ram", [1, 3])
@pytest.mark.parametrize("disk", [0, 1, 4])
@pytest.mark.parametrize(("uf", "ub", "wd", "rd"), [(1, 1, 2, 2), (1, 1, 0.5, 0.25), (1, 3, 5, 4), (4, 1, 3, 1)])
def test_ours_run_unchanged_and_never_cost_more(max_n: int, ram: int, disk: int, uf: float, ub: float, wd: float, rd: float) -> None:
    levels = (StorageLevel(slots=ram), StorageLevel(slots=disk, write_cost=wd, read_cost=rd))
    plan = plan_hrevolve(Chain(num_steps=max_n - 1, levels=levels, forward_cost=uf, backward_cost=ub))
    ours = execute(ActionSchedule(plan), max_n, ram, disk)
    assert cost(ours, uf, ub, wd, rd) == plan.cost
    if disk and max_n > 1:  # theirs cannot do a single step
        theirs = execute(cs.HRevolve(max_n, ram, disk, uf=uf, ub=ub, wd=wd, rd=rd), max_n, ram, disk, strict=False)
        assert plan.cost <= cost(theirs, uf, ub, wd, rd)


@pytest.mark.parametrize("max_n", [1, 5, 40])
def test_every_planner_of_one_level(max_n: int) -> None:
    plans = [plan_revolve(single_level(max_n - 1, 3)), plan_online(single_level(max_n - 1, 3))]
    plans += [plan_store_all(single_level(max_n - 1, max_n)), plan_sqrt(single_level(max_n - 1, max_n))]
    for plan in plans:
        executor = execute(ActionSchedule(plan), max_n, max_n, 0)
        assert cost(executor, 1, 1, 0, 0) == plan.cost
    theirs = execute(cs.Revolve(max_n, 3), max_n, 3, 0, strict=False)
    assert plans[0].cost <= cost(theirs, 1, 1, 0, 0)


def test_attributes_of_the_interface() -> None:
    schedule = ActionSchedule(plan_revolve(single_level(9, 2)))
    assert schedule.max_n == 10
    assert not schedule.is_exhausted
    assert schedule.uses_storage_type(cs.StorageType.RAM)
    assert not schedule.uses_storage_type(cs.StorageType.DISK)
    with pytest.raises(Unsupported, match="two levels"):
        ActionSchedule(plan_hrevolve(Chain(num_steps=3, levels=(StorageLevel(slots=1),) * 3)))
