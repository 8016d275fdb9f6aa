"""Artifacts as JSON: exact round trips, one-line refusals, files written whole."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tests import strategies as some
from tests.small import chain

from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level
from memfit.core.errors import BadInput
from memfit.core.files import MAX_FILE_BYTES
from memfit.core.graph import Graph
from memfit.core.io import Artifact, check_target, dumps, load, loads, save
from memfit.core.lifetimes import lifetimes
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Layout, Plan
from memfit.core.schedule import Compute, Schedule
from memfit.core.simulate import simulate

ONE = some.random_case(Random(3))


def artifacts_of(case: some.Case) -> list[Artifact]:
    """One artifact of every kind, the outcome both with and without a plan."""
    timeline = simulate(case.graph, case.schedule, case.costs)
    num_allocations = len(lifetimes(case.graph, case.schedule, case.costs))
    plan = Plan(
        schedule=case.schedule,
        timeline=timeline,
        planner="test",
        graph_digest=case.graph.digest,
        budget=Budget(device_bytes=timeline.peak_bytes, deeper_bytes=(None, 7)),
        layout=Layout(offsets=tuple(range(num_allocations)), height_bytes=2**62),
    )
    return [
        case.graph,
        case.costs,
        case.schedule,
        plan,
        replace(plan, layout=None),
        Outcome(status=Status.FEASIBLE, plan=plan, lower_bound_ns=3, gap_fraction=0.1 + 0.2, seconds=1e-7, reason="done – schön"),
        Outcome(status=Status.INFEASIBLE, lower_bound_bytes=2**62, reason="too small"),
    ]


@settings(max_examples=100, deadline=None)
@given(some.cases())
def test_round_trips_are_exact(case: some.Case) -> None:
    for artifact in artifacts_of(case):
        text = dumps(artifact)
        again = loads(text, type(artifact))
        assert again == artifact
        assert dumps(again) == text


def test_sums_past_two_to_the_63_round_trip() -> None:
    graph = chain(2, 2**60)
    costs = Costs(op_time_ns=(2**62 - 1,) * 2, workspace_bytes=(2**62 - 1,) * 2)
    schedule = Schedule(steps=(Compute(0), Compute(1), Compute(1)))
    plan = Plan(schedule=schedule, timeline=simulate(graph, schedule, costs), planner="x", graph_digest=graph.digest)
    assert loads(dumps(plan)) == plan


def test_names_that_no_terminal_can_print_round_trip() -> None:
    graph = chain(1)
    odd = replace(graph, digest="", ops=(replace(graph.ops[0], name="\ud800\n\x00", where="ü"),))
    assert loads(dumps(odd)) == odd


def test_numpy_integers_are_written_as_integers() -> None:
    schedule = Schedule(steps=(Compute(np.int64(0)),))  # type: ignore[arg-type]
    assert loads(dumps(schedule)) == Schedule(steps=(Compute(0),))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_what_json_cannot_hold_is_refused_when_written(bad: Any) -> None:
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        dumps(Outcome(status=Status.UNKNOWN, seconds=bad))


def _edited(artifact: Artifact, **changes: Any) -> str:
    return json.dumps(json.loads(dumps(artifact)) | changes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not a memfit file"),
        ("null", "not a memfit file"),
        ("{}", "not a memfit file"),
        ('{"format": 3}', "not a memfit file"),
        ('{"format": "memfit.banana"}', "unknown format 'memfit.banana': known are memfit.graph"),
        ('{"format": "memfit.graph"}', "version None is not the version 1"),
        ('{"format": "memfit.graph", "version": 2}', "version 2 is not"),
        ('{"format": "memfit.graph", "version": true}', "version True is not"),
        ('{"format": "memfit.graph", "version": 1.0}', "version 1.0 is not"),
        ('{"format": "memfit.graph", "version": 1}', "field 'storages' is missing"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [], "steps": []}', "a key appears twice"),
        ('{"format": "memfit.schedule", "version": 1, "steps": NaN}', "NaN is not a number"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [["compute", 1e5, 0]]}', "should be a non-negative whole number"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [["compute", true, 0]]}', "should be a non-negative whole number"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [["compute", -1, 0]]}', "should be a non-negative whole number"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [["compute", 9223372036854775808, 0]]}', "below 2"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [["compute", 0]]}', "should be a list of 3 entries"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [["explode", 0, 0]]}', "'explode' is not one of compute, free"),
        ('{"format": "memfit.schedule", "version": 1, "steps": {}}', "should be a list, not an object"),
        ('{"format": "memfit.schedule", "version": 1, "steps": null}', "should be a list, not null"),
        ('{"format": "memfit.schedule", "version": 1, "steps": [], "extra": 1}', "unknown field 'extra'"),
        ('{"format": "memfit.schedule", "version": 1, "steps": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"format": "memfit.schedule", "version": 1, "steps": ' + "9" * 4000 + "}", "absurdly large"),
        (b"\xff\xfe\xfa", "not (UTF-8 text|valid JSON)"),
        (b"\x80abc", "not UTF-8 text"),
        (_edited(ONE.graph, digest="0" * 64), "does not match its content"),
        (_edited(ONE.graph, sources=[10**6]), "source names tensor 1000000"),
        (_edited(ONE.graph, storages=[[-5, "input", ""]]), "-5 bytes|tensor"),
        (_edited(ONE.graph, storages=[[5, "banana", ""]]), "'banana' is not one of parameter"),
        (_edited(ONE.costs, levels=[[1e301, 0, 0, 0]]), "should be a number"),
        (_edited(ONE.costs, levels=[[123, 0, 0, 0]]).replace("123", "1e400"), "should be a number, not inf"),
        (_edited(ONE.costs, levels=[[float("inf"), 0, 0, 0]]), "Infinity is not a number"),
        (_edited(ONE.costs, levels=[[-1, 0, 0, 0]]), "bandwidth"),
        (_edited(ONE.costs, op_time_ns=[-1]), "negative"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_bad_text_is_refused_in_one_line(text: str | bytes, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint) as refusal:
        loads(text, source="x.json")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


def test_a_cycle_is_refused() -> None:
    ops = [{"name": "a", "inputs": [2], "outputs": [1]}, {"name": "b", "inputs": [1], "outputs": [2]}]
    data = {"storages": [[1, "input", ""]] * 3, "tensors": [[0, ""], [1, ""], [2, ""]], "sources": [0], "results": [2], "ops": ops}
    with pytest.raises(BadInput, match="a cycle"):
        loads(json.dumps({"format": "memfit.graph", "version": 1, **data}))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("timeline", "peak_step"), 10**6, "its peak at step 1000000"),
        (("timeline", "peak_step"), -2, "field 'peak_step'"),
        (("timeline", "bytes_at_step"), [1], "entries for|timeline of 1|peak at step"),
        (("timeline", "bytes_by_kind"), {"input": []}, "0 entries for input"),
        (("timeline", "bytes_by_kind"), {"banana": []}, "'banana' is not one of"),
        (("schedule", "steps"), [], "the plan has 0 steps and a timeline of"),
        (("layout", "offsets"), [-1], "field 'offsets'"),
        (("budget",), [1], "at least 3"),
        (("budget",), [None, -1, None], "field 'budget'"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(path: tuple[str, ...], value: Any, complaint: str) -> None:
    data = json.loads(dumps(artifacts_of(some.random_case(Random(1)))[3]))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(BadInput, match=complaint):
        loads(json.dumps(data))


def test_the_wrong_kind_is_named() -> None:
    with pytest.raises(BadInput, match="holds a schedule, but a graph is expected"):
        loads(dumps(ONE.schedule), Graph)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_nesting_is_refused(opening: str) -> None:
    with pytest.raises(BadInput, match="nested too deeply"):
        loads(opening * 2_000_000)
    with pytest.raises(BadInput):
        loads('{"format": "memfit.schedule", "version": 1, "steps": ' + "[" * 500 + "]" * 500 + "}")


def test_a_gigabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.write(b"[" * 1000)
        file.truncate(10**9)  # sparse: takes no room
    with pytest.raises(BadInput, match=r"953.67 MiB is more than the 256.00 MiB"):
        load(path)
    assert MAX_FILE_BYTES < 10**9


# -- files ---------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    for k, artifact in enumerate(artifacts_of(ONE)):
        save(artifact, tmp_path / f"{k}.json")
        assert load(tmp_path / f"{k}.json", type(artifact)) == artifact
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save(chain(1), path)
    with pytest.raises(BadInput, match="exists: choose another name, or pass --force"):
        save(chain(2), path)
    assert load(path) == chain(1)
    save(chain(2), path, force=True)
    assert load(path) == chain(2)


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    save(chain(1), tmp_path / "ours.json")
    (tmp_path / "plain.txt").write_text("")
    assert stat.S_IMODE((tmp_path / "ours.json").stat().st_mode) == stat.S_IMODE((tmp_path / "plain.txt").stat().st_mode)


@pytest.mark.parametrize("name", ["missing/x.json", "", ".", "a" * 300, "a\0b"])
def test_unwritable_targets_are_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput):
        check_target(os.path.join(tmp_path, name), force=True)
    with pytest.raises(BadInput):
        save(chain(1), os.path.join(tmp_path, name), force=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing.json", ".", "a" * 300, "a\0b"])
def test_unreadable_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be"):
        load(os.path.join(tmp_path, name))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no endless device here")
def test_an_endless_device_is_refused() -> None:
    with pytest.raises(BadInput, match=r"more than the 256\.00 MiB"):
        load("/dev/zero")


def test_levels_round_trip_to_the_last_bit() -> None:
    costs = Costs(op_time_ns=(), workspace_bytes=(), levels=(Level(write_bytes_per_s=0.1 + 0.2, read_bytes_per_s=1e22),))
    assert loads(dumps(costs)) == costs
